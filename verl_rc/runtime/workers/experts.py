"""Models with experts: what cannot be trained of them."""

from typing import Any

from verl_rc.config.run import RunConfig

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of the number of experts in the configurations of different model families."""
ROUTERS = {"qwen2_moe": "Qwen2MoeTopKRouter", "qwen3_moe": "Qwen3MoeTopKRouter"}
"""Routers of transformers that can replay experts, by model family. Its forward pass returns logits, weights
and ids of experts; the weights are the softmax of the logits at these ids, divided by their sum where
``norm_topk_prob`` says so."""
_MOST_REPLAYED = 256
"""Experts of a layer whose number fits into a byte."""


def num_experts(config: Any) -> int:
    """Experts in each layer that has some, by a model's ``config.json``; 0 in a dense model."""
    text = config.get_text_config()
    return next((count for name in _COUNTS if (count := getattr(text, name, None))), 0)


def idle_share(config: Any) -> float:
    """The share of a layer's experts that a token does not take; 0 for a dense model."""
    count = num_experts(config)
    return 1 - config.get_text_config().num_experts_per_tok / count if count else 0.0


def experts_problem(config: RunConfig, path: str, source: Any) -> str | None:
    """The reason why a model at ``path`` with this ``config.json`` cannot be trained with its experts, or
    None."""
    policy = config.actor_rollout_ref
    if path != policy.model.path:
        return None
    count, family = num_experts(source), source.get_text_config().model_type
    if policy.rollout.enable_rollout_routing_replay and (family not in ROUTERS or count > _MOST_REPLAYED):
        return (
            f"experts are replayed in models of the families {', '.join(ROUTERS)} with up to "
            f"{_MOST_REPLAYED} experts in a layer, it is of {family} and has {count}: drop "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay"
        )
    if not count:
        return None
    if policy.exact:
        return "it has experts, which exact mode does not cover: drop actor_rollout_ref.exact"
    if policy.rollout.quantization and config.trainer.device == "cpu":
        return (
            "it has experts, and vLLM has no quantised kernel for them on a CPU: pass "
            f"actor_rollout_ref.rollout.quantization=null in place of {policy.rollout.quantization}"
        )
    if policy.model.adapter_rank:
        return (
            "it has experts, beside which adapters in an engine are not proven: pass "
            "actor_rollout_ref.model.lora.merge=True"
        )
    if policy.model.lora_rank and policy.model.target_modules == "all-linear":
        return (
            "it has experts, to which adapters cannot be merged: name the linear layers that get adapters in "
            "place of all-linear, e.g. actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj]"
        )
    return None
