"""What runs of several studies start from, and how they run."""

from collections.abc import Mapping

from verl_rc.study.study import ROLLOUT, Task

FP8_WEIGHTS = f"{ROLLOUT}.quantization=fp8_per_channel"
UNGUARDED = (f"{ROLLOUT}.sync_proof.gap_limit=50", "trainer.alerts.mismatch_limit=null")
"""Overrides of runs with a fault that the trainer would see, and stop at."""
ENGINES: Mapping[str, tuple[str, ...]] = {
    "fp8both": (FP8_WEIGHTS, *UNGUARDED),
    "fp8kv": UNGUARDED,
    "fp8w": (FP8_WEIGHTS,),
    "bf16": (),
    "fp32": (f"{ROLLOUT}.dtype=float32",),
}
"""Overrides of an engine by its name, the widest gap first."""
FP8_CACHE = ("fp8both", "fp8kv")
"""Engines whose key-value cache is rounded to fp8 as it is written."""

LONG = Task(
    "long",
    # Heads of 32, for an fp8 cache.
    {
        "NUM_HEADS": "6",
        "DIGITS_OPTIONS": "--length 48 --num_sft 65536",
        "SFT_OPTIONS": "trainer.total_training_steps=600 trainer.test_freq=10 trainer.stop_at_accuracy=0.25",
    },
)
"""Sorting 48 digits: answers of 49 tokens."""
LONG_RUN = (
    *("task=digits", "hardware=cpu", "data.max_prompt_length=56", "data.max_response_length=56"),
    *(
        "trainer.total_training_steps=30",
        "trainer.test_freq=10",
        "trainer.save_freq=-1",
        "trainer.report=never",
    ),
    *("actor_rollout_ref.actor.optim.lr=5e-5", "actor_rollout_ref.actor.optim.lr_scheduler_type=constant"),
)
"""Overrides of every run on the long task. At twice this rate a model may unlearn it in five steps, corrected
or not."""

SHORT_RUN = (
    *("task=digits", "hardware=cpu", "trainer.report=never"),
    *("trainer.total_training_steps=60", "trainer.test_freq=10", "trainer.save_freq=-1"),
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
)
"""Overrides of runs on the quickstart's task."""
