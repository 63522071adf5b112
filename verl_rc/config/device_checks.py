"""What cannot be computed on a kind of device."""

from collections.abc import Iterator

from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig, fsdp_section

_UNUSABLE_QUANTIZATIONS = {
    "fp8": "vLLM's CPU build lacks its kernel; use fp8_per_channel",
    "fp8_per_tensor": "vLLM's CPU build lacks its kernel; use fp8_per_channel",
    "int8_per_channel_weight_only": "it changes nothing but experts, for which there is no kernel there",
    "experts_int8": "it changes nothing but experts, for which there is no kernel there",
}
_LONGEST_FLOAT32_ROW = 2048
"""No fused kernel takes float32 with grouped queries: all scores are kept, 7.5 GiB for 8,192 tokens and 28
heads."""


def check_device(config: RunConfig, device: str) -> Iterator[str]:
    """Yield a sentence for each contradiction; none for the device ``auto``."""
    rollout = config.actor_rollout_ref.rollout
    if device == "cpu" and rollout.quantization in _UNUSABLE_QUANTIZATIONS:
        yield (
            f"actor_rollout_ref.rollout.quantization={rollout.quantization} cannot be used on a CPU: "
            f"{_UNUSABLE_QUANTIZATIONS[rollout.quantization]}."
        )
    precise = [
        f"{fsdp_section(role)}.dtype"
        for role, fsdp in config.fsdp_configs.items()
        if torch_name(fsdp.dtype) == "float32"
    ]
    if device == "cuda" and precise and config.longest_sequence > _LONGEST_FLOAT32_ROW:
        yield (
            f"on a GPU attention in float32 takes sequences of at most {_LONGEST_FLOAT32_ROW:,} tokens, "
            "because all attention scores of one are kept; data.max_prompt_length + "
            f"data.max_response_length is {config.longest_sequence:,}. Pass "
            f"{' and '.join(f'{key}=bfloat16' for key in precise)}, or lower the lengths."
        )
    judge = config.reward.reward_model
    gpus = judge.rollout.tensor_model_parallel_size if device == "cuda" else 0
    if device != "auto" and judge.enable and judge.rollout.name and judge.n_gpus_per_node != gpus:
        yield (
            f"reward.reward_model.rollout.name=vllm computes on the trainer's kind of device, {device}; pass "
            f"reward.reward_model.n_gpus_per_node={gpus}."
        )
    if device == "cuda" and config.algorithm.max_refills and config.actor_rollout_ref.hybrid_engine:
        yield (
            f"algorithm.max_refills={config.algorithm.max_refills} needs engines that are awake when the "
            "trainer has scored, and those that share its GPUs sleep then; pass "
            "actor_rollout_ref.hybrid_engine=False, or drop it."
        )
    if device == "cuda" and rollout.dtype == "float32" and config.actor_rollout_ref.model.adapter_rank:
        yield (
            "actor_rollout_ref.model.lora.merge=False needs actor_rollout_ref.rollout.dtype=bfloat16 or "
            "float16 on a GPU, where vLLM has no kernel for adapters in float32; pass one of them, or "
            "merge=True."
        )
