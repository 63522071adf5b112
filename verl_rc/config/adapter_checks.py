"""What adapters in the engines need."""

from collections.abc import Iterator

from verl_rc.config.models import ENGINE_ADAPTER_RANKS
from verl_rc.config.run import RunConfig


def check_adapters(config: RunConfig) -> Iterator[str]:
    """What does not fit, one sentence each."""
    model, largest = config.actor_rollout_ref.model, ENGINE_ADAPTER_RANKS[-1]
    if model.adapter_rank > largest:
        yield (
            f"actor_rollout_ref.model.lora.merge=False needs actor_rollout_ref.model.lora_rank of at most "
            f"{largest}, for which vLLM has room, got {model.lora_rank}; lower it, or pass merge=True."
        )
    if problem := adapter_problem(config, config.trainer.device):
        yield problem


def adapter_problem(config: RunConfig, device: str) -> str | None:
    """Say why engines on ``device`` cannot apply adapters, or None; of ``auto`` nothing is known yet."""
    policy = config.actor_rollout_ref
    if device != "cuda" or policy.rollout.dtype != "float32" or not policy.model.adapter_rank:
        return None
    return (
        "actor_rollout_ref.model.lora.merge=False needs actor_rollout_ref.rollout.dtype=bfloat16 or float16 "
        "on a GPU, where vLLM has no kernel for adapters in float32; pass one of them, or merge=True."
    )
