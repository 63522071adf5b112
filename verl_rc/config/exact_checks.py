"""Refusal of all settings with which exact mode has not been shown to work."""

from collections.abc import Iterator

from verl_rc.config.models import torch_name
from verl_rc.config.run import RunConfig, fsdp_section

_MODE = "actor_rollout_ref.exact=True"
_ROLLOUT, _MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def check_exact_mode(config: RunConfig) -> Iterator[str]:
    """Yield a sentence for each contradiction."""
    if not config.actor_rollout_ref.exact:
        return
    yield from _precisions(config)
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    shares = {
        f"{fsdp_section(role)}.ulysses_sequence_parallel_size": (size, 1)
        for role, size in config.sequence_parallel_sizes.items()
        if role != "critic"
    }
    values: dict[str, tuple[object, object]] = {
        f"{_ROLLOUT}.quantization": (rollout.quantization, None),
        f"{_ROLLOUT}.kv_cache_dtype": (rollout.kv_cache_dtype, "auto"),
        f"{_ROLLOUT}.tensor_model_parallel_size": (rollout.tensor_model_parallel_size, 1),
        **{
            f"{_ROLLOUT}.engine_kwargs.vllm.{name}": (rollout.engine_kwargs.vllm.get(name), None)
            for name in ("compilation_config", "attention_backend", "attention_config")
        },
        f"{_ROLLOUT}.top_p": (rollout.top_p, 1.0),
        f"{_ROLLOUT}.top_k": (rollout.top_k, -1),
        f"{_ROLLOUT}.min_p": (rollout.min_p, 0.0),
        f"{_MODEL}.lora_rank": (model.lora_rank, 0),
        f"{_MODEL}.head_dtype": (model.head_dtype, None),
        f"{_MODEL}.share_prefixes": (model.share_prefixes or "auto", "auto"),
        **shares,
    }
    if config.async_training.on_update == "keep":
        values["async_training.kv_cache_on_update"] = ("keep", "recompute")
    loss = config.distillation.distillation_loss
    if config.distillation.enabled and loss.loss_mode == "forward_kl_topk":
        values["distillation.distillation_loss.loss_mode"] = (loss.loss_mode, "k3")
    for key, (value, proven) in values.items():
        if value != proven:
            text = "null" if proven is None else proven
            yield f"{_MODE} is not proven with {key}={value}; pass {key}={text}, or drop exact."


def _precisions(config: RunConfig) -> Iterator[str]:
    engine = config.actor_rollout_ref.rollout.dtype
    if engine == "float16":
        yield (
            f"{_MODE} is not proven in float16, got {_ROLLOUT}.dtype=float16; pass float32 or bfloat16 there "
            f"and in {fsdp_section('actor')}.dtype."
        )
    for role, fsdp in config.fsdp_configs.items():
        if role != "critic" and torch_name(fsdp.dtype) != engine:
            yield (
                f"{_MODE} needs one precision on both sides, got {_ROLLOUT}.dtype={engine} and "
                f"{fsdp_section(role)}.dtype={fsdp.dtype}; pass the same for both."
            )
