"""The faults: what is planted, what it must be called, and the configuration of a run that it is planted
in."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from verl_rc.health.cause_table import OUTSIDE_MASK, STOP_LOST

ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
HEALTHY = ("rounding",)
"""What a run without a fault must be called. A statement that is neither fault nor notice counts as this."""
_STALE = ("weights never arrive", "one version late", "an update was missed", "older weights")
_CONTEXT = ("the trainer scores other inputs or with noise",)


def planted() -> dict[str, str]:
    """What the environment variable ``PLANTED_FAULT`` plants in this process, each with its value."""
    words = os.environ.get("PLANTED_FAULT", "").split(",")
    return {name: value for name, _, value in (word.partition(":") for word in words if word)}


@dataclass(frozen=True)
class Fault:
    """One arm: what is planted, and under which names it counts as found."""

    number: int
    """In shared order; 0: healthy."""
    remedies: tuple[str, ...]
    """Causes that lead to the right remedy."""
    overrides: tuple[str, ...] = ()
    """A fault that the configuration alone makes, or what it needs to show."""
    planted: str = ""
    """What the workers do wrong, see ``workers.py``; empty: nothing."""
    replay_only: bool = False
    """No metric can see it: it counts as found without replays when nothing else is named."""
    checks: tuple[str, ...] = ()
    """Words of the error with which the run itself ends, where it may."""


COMMON = (
    *("task=digits", "hardware=cpu", "correction=decoupled_token_is", "trainer.logger=[console]"),
    *(
        "trainer.total_training_steps=24",
        "trainer.save_freq=4",
        "trainer.test_freq=-1",
        "trainer.val_before_train=False",
    ),
    *("trainer.resume_mode=disable", "trainer.report=never", "trainer.token_records.rows_per_step=64"),
    *("trainer.token_records.freq=4", "trainer.token_records.full_freq=1"),  # whole steps, for in_files.py
    f"{ACTOR}.optim.lr_scheduler_type=constant",
    # The run's own guards note what they find and stop nothing: the doctor is to be asked.
    *(
        f"{ROLLOUT}.sync_proof.gap_limit=50",
        f"{ROLLOUT}.sync_proof.canary_freq=0",
        "trainer.alerts.mismatch_limit=null",
    ),
)
"""Overrides of every run."""
_FP8 = (f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.quantization=fp8_per_channel")
_BF16 = (f"{ROLLOUT}.dtype=bfloat16",)


def _ahead(age: int) -> tuple[str, ...]:
    return (*_BF16, "async=one_step_off", f"async_training.staleness_threshold={age}")


ARMS: Mapping[str, Fault] = {
    "healthy bf16": Fault(0, HEALTHY, _BF16),
    "healthy fp8": Fault(0, HEALTHY, _FP8),
    "healthy fp32": Fault(0, HEALTHY, (f"{ROLLOUT}.dtype=float32",)),
    "temperature 0.9": Fault(1, ("temperature",), _BF16, "temperature:0.9"),
    "temperature 0.98": Fault(2, ("temperature",), _BF16, "temperature:0.98"),
    "raw at 0.7": Fault(
        3, ("raw log-probs at another temperature",), (*_BF16, f"{ROLLOUT}.temperature=0.7"), "report_raw"
    ),
    "top-p 0.95": Fault(4, ("sampling filter not mirrored",), _BF16, "top_p:0.95"),
    "top-p 0.95 raw": Fault(
        5, ("sampled from another distribution than reported",), _BF16, "top_p:0.95,report_raw"
    ),
    "log-probs shifted": Fault(6, ("log-probs shifted",), _BF16, "shifted_log_probs"),
    "mask shifted": Fault(7, (OUTSIDE_MASK.name,), _BF16, "shifted_mask", checks=("mask", "LedgerError")),
    "one sync skipped": Fault(8, _STALE, (*_BF16, "trainer.save_freq=1"), "skip_one_sync", replay_only=True),
    "every sync skipped": Fault(9, _STALE, _BF16, "skip_every_sync"),
    "half a tensor": Fault(
        10,
        ("the engine had other prompts, sampling, cache or weights",),
        _BF16,
        "half_a_tensor",
        replay_only=True,
    ),
    "tokens changed": Fault(
        12,
        (
            "few tokens are others than sampled",
            "not the sampled tokens, or not their log-probs",
            STOP_LOST.name,  # stop tokens are among those that are changed
        ),
        _BF16,
        "changed_tokens",
    ),
    "bf16 transport": Fault(13, ("log-probs rounded",), _BF16, "rounded_log_probs"),
    "prompt token missing": Fault(14, _CONTEXT, _BF16, "missing_prompt_token", replay_only=True),
    "padding attended": Fault(15, _CONTEXT, _BF16, "attended_padding:20", replay_only=True),
    "one engine of two stale": Fault(
        16,
        ("one engine differs from the others", *_STALE),
        (*_BF16, "actor_rollout_ref.hybrid_engine=False", f"{ROLLOUT}.n_gpus_per_node=2"),
        "stale_second_engine",
    ),
    "dropout in the trainer": Fault(17, _CONTEXT, _BF16, "dropout", replay_only=True),
    "stop token banned": Fault(18, ("token banned",), _BF16, "banned_stop"),
    "four updates in bypass": Fault(
        19,
        ("drift within the step",),
        (*_BF16, "algorithm.rollout_correction.bypass_mode=True", f"{ACTOR}.ppo_epochs=2"),
    ),
    "age 1": Fault(20, ("staleness",), _ahead(1)),
    "age 4": Fault(20, ("staleness",), _ahead(4)),
    "NaN in 0.1 %": Fault(21, ("overflow or empty logits",), _BF16, "nan_log_probs"),
}
"""All arms by name."""
HEALTHY_FOR_LONG: Mapping[str, Fault] = {
    arm.replace("healthy", "1000 healthy steps in"): Fault(
        0,
        HEALTHY,
        (
            *ARMS[arm].overrides,
            *("trainer.total_training_steps=1000", "trainer.total_epochs=100", "trainer.save_freq=500"),
            *("trainer.token_records.freq=100", "trainer.max_actor_ckpt_to_keep=1"),
            *("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=8", f"{ROLLOUT}.n=2"),
        ),
    )
    for arm in ("healthy bf16", "healthy fp8", "healthy fp32")
}
"""Runs in which nothing may be found; small batches keep them short and are the harder case for what is
counted in errors."""
LEFT_OUT = {
    11: "prefix cache not reset: prompts of this task are shorter than a block of the cache; a test with "
    "longer ones plants it",
    22: "fp8 cache: vLLM on a CPU has it for heads of 32 or 64 alone, the quickstart's model has heads of 48",
}
"""Faults of the plan that are not planted, and why."""
