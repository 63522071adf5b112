"""Models with experts: what cannot be trained of them."""

from typing import Any

from verl_rc.config.run import RunConfig

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What families of models call their number of experts."""


def num_experts(config: Any) -> int:
    """Experts in each layer that has some, by a model's ``config.json``; 0: a dense model."""
    text = config.get_text_config()
    return next((count for name in _COUNTS if (count := getattr(text, name, None))), 0)


def idle_share(config: Any) -> float:
    """The share of the experts of a layer that a token does not take; 0 for a dense model."""
    count = num_experts(config)
    return 1 - config.get_text_config().num_experts_per_tok / count if count else 0.0


def experts_problem(config: RunConfig, path: str, source: Any) -> str | None:
    """Why a model at ``path`` with this ``config.json`` cannot be trained with its experts, or None."""
    policy = config.actor_rollout_ref
    if path != policy.model.path or not num_experts(source):
        return None
    if policy.exact:
        return "it has experts, which exact mode does not cover: drop actor_rollout_ref.exact"
    if policy.rollout.quantization and config.trainer.device == "cpu":
        return (
            "it has experts, and vLLM has no quantised kernel for them on a CPU: pass "
            f"actor_rollout_ref.rollout.quantization=null in place of {policy.rollout.quantization}"
        )
    if policy.model.lora_rank and policy.model.target_modules == "all-linear":
        return (
            "it has experts, to which adapters cannot be merged: name the linear layers that get adapters in "
            "place of all-linear, e.g. actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        )
    return None
