"""What records the fields of tokens in each trainer: its own option, or this project's hook."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_rc.insight.hooks import openrlhf
from verl_rc.insight.run_folder.trainers import nemo_rl, open_instruct, prime_rl, skyrl, slime

_BOTH = ("rollout_log_prob", "old_log_prob")


@dataclass(frozen=True)
class Recording:
    """How one trainer records tokens."""

    option: str
    """What to write, word for word."""
    records: tuple[str, ...]
    """Fields of a token record that the option gives, beside mask, ids and prompts."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The trainer's names of fields."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Fields that need more than the option: what, word for word."""


RECORDINGS: Mapping[str, Recording] = {
    "TRL": Recording(
        "from verl_rc.insight.hooks.trl import record_tokens; record_tokens(trainer)",
        (*_BOTH, "entropy", "sum_pi_squared", "score", "advantage", "version", "finished"),
        {
            "response_mask": "completion_mask * tool_mask",
            "rollout_log_prob": "sampling_per_token_logps",
            "old_log_prob": "old_per_token_logps",
            "entropy": "entropies",
            "advantage": "advantages",
            "ref_log_prob": "ref_per_token_logps",
            "weight": "importance_sampling_ratio",
        },
        {"weight": "use_vllm=True", "ref_log_prob": "beta above 0"},
    ),
    "verl": Recording(
        "VERL_RC_TOKENS=FOLDER in the environment, actor_rollout_ref.rollout.calculate_log_probs=True",
        (*_BOTH, "entropy", "score", "advantage", "version"),
        {
            "response_mask": "loss_mask",
            "rollout_log_prob": "rollout_log_probs",
            "old_log_prob": "old_log_probs",
            "score": "rm_scores",
            "advantage": "advantages",
            "version": "min_global_steps",
            "weight": "rollout_is_weights",
            "kept": "response_mask",
        },
    ),
    "OpenRLHF": Recording(
        "worker_process_setup_hook=verl_rc.insight.hooks.openrlhf.attach in Ray's runtime environment, "
        "VERL_RC_TOKENS=FOLDER, --algo.advantage.is_correction_enable",
        (*_BOTH, "score", "advantage", "finished"),
        {**openrlhf.FIELDS, "score": "rewards"},
    ),
    "AReaL": Recording(
        "scheduling_spec.cmd: python -m verl_rc.insight.hooks.areal, env_vars: {VERL_RC_TOKENS: FOLDER}",
        (*_BOTH, "score", "advantage", "version"),
        {
            "response_mask": "loss_mask",
            "rollout_log_prob": "logprobs",
            "old_log_prob": "prox_logp",
            "ref_log_prob": "ref_logp",
            "advantage": "advantages",
            "score": "rewards",
            "version": "versions",
        },
    ),
    "prime-rl": Recording(
        "trainer.enable_token_export=true", (*_BOTH, "entropy", "advantage"), prime_rl.FIELDS
    ),
    "NeMo-RL": Recording(
        "nothing: on by default, unless env.should_log_nemo_gym_responses is set",
        (*_BOTH, "score", "advantage"),
        nemo_rl.FIELDS,
    ),
    "slime": Recording(
        "--dump-details FOLDER",
        (*_BOTH, "score", "advantage", "version", "finished"),
        slime.FIELDS,
        {"entropy": "--use-rollout-entropy"},
    ),
    "miles": Recording("--dump-details FOLDER", (*_BOTH, "score", "advantage", "finished"), slime.FIELDS),
    "SkyRL": Recording("trainer.dump_data_batch=true", (*_BOTH, "advantage"), skyrl.FIELDS),
    "open-instruct": Recording(
        "--save_traces", ("rollout_log_prob", "score", "advantage", "finished"), open_instruct.FIELDS
    ),
}
"""By the trainer's name; docs/your_trainer.md says the same to people."""
