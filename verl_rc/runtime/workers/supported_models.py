"""Which models can be trained."""

from importlib.util import find_spec
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
)

from verl_rc.config.models import model_source
from verl_rc.config.run import RunConfig, fsdp_section
from verl_rc.records.vision_models import VISION_FAMILIES
from verl_rc.runtime.workers.experts import experts_problem
from verl_rc.runtime.workers.language_model import language_model_class

_WITH_WINDOWS = ("mistral", "qwen2", "qwen3", "olmo3", "gemma3_text", "gpt_oss")
"""Values of ``model_type`` whose windows count the query, and whose engine was compared with the trainer."""
_WITH_STATE = ("qwen3_next", "qwen3_5_text")
"""The same of models with gated delta nets."""


def unsupported_model(config: RunConfig, path: str, trust_remote_code: bool) -> str | None:
    """The reason why the model at ``path`` cannot be trained or score as a frozen policy, by its
    ``config.json``; None when it can."""
    policy = config.actor_rollout_ref
    roles = {
        "actor": policy.model.path,
        "critic": config.critic.model.path,
        **{role: frozen.model_path for role, frozen in config.frozen_policies.items()},
    }
    roles = {role: of_role for role, of_role in roles.items() if of_role == path}
    if not roles:
        return None
    source = AutoConfig.from_pretrained(model_source(path), trust_remote_code=trust_remote_code)
    problems = [
        attention_problem(source, config.longest_sequence),
        experts_problem(config, path, source),
        _quantisation_problem(source),
        _family_problem(source),
        *(_sharing_problem(config, role, source) for role in roles),
    ]
    if "actor" in roles:
        problems += [_exact_problem(config, source), _head_problem(config, source)]
        problems.append(_buffers_problem(config, source))
        problems.append(_state_problem(config) if has_state(source) else None)
        problems.append(_picture_problem(config, source) if source.model_type in VISION_FAMILIES else None)
    if "critic" in roles and config.needs_critic and not trust_remote_code:
        problems.append(_critic_problem(source))
    problems.append(_torchvision_problem(source))
    return next((problem for problem in problems if problem is not None), None)


def _quantisation_problem(source: Any) -> str | None:
    quantised = getattr(source, "quantization_config", None)
    if not quantised:
        return None
    method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
    return (
        f"its weights are stored quantised ({method}), which cannot be trained: write them in bfloat16 "
        "first, of gpt-oss with transformers' Mxfp4Config(dequantize=True) and save_pretrained"
    )


def _sharing_problem(config: RunConfig, role: str, source: Any) -> str | None:
    """The reason why ranks of ``role`` cannot share the tokens of a row, or None."""
    sizes, text = {role: 1, **config.sequence_parallel_sizes}, source.get_text_config()
    size = sizes[role]
    key = f"{fsdp_section(role)}.ulysses_sequence_parallel_size"
    if size == 1:
        return None
    if has_state(source) or text.model_type == "gpt_oss":
        part = "a recurrent state" if has_state(source) else "sinks"
        return f"it has layers with {part}, which ranks that share a row do not divide: pass {key}=1"
    heads = text.num_attention_heads
    if heads % size == 0:
        return None
    largest = max(count for count in range(1, size) if heads % count == 0 and config.num_ranks % count == 0)
    return (
        f"{key}={size} must divide its {heads} attention heads: pass {largest}, and lengths whose part of a "
        "row then fits"
    )


def _exact_problem(config: RunConfig, source: Any) -> str | None:
    window = window_of(source, config.longest_sequence)
    if not config.actor_rollout_ref.exact or window is None:
        return None
    return (
        f"exact mode is not built for attention that looks back sliding_window={window} tokens: drop "
        f"actor_rollout_ref.exact, or lower data.max_prompt_length + data.max_response_length to {window}"
    )


def _head_problem(config: RunConfig, source: Any) -> str | None:
    head, vocabulary = config.algorithm.rollout_correction.head_tokens, source.get_text_config().vocab_size
    if head <= vocabulary:
        return None
    return (
        f"algorithm.rollout_correction.score_centering.top_k={head} must be at most the {vocabulary} "
        f"tokens of its vocabulary: pass top_k={vocabulary}"
    )


def _buffers_problem(config: RunConfig, source: Any) -> str | None:
    if config.actor_rollout_ref.rollout.load_format != "dummy":
        return None
    with torch.device("meta"):
        model = language_model_class(source).from_config(
            source, trust_remote_code=config.actor_rollout_ref.model.trust_remote_code
        )
    buffers = model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys()
    if not buffers:
        return None
    return (
        f"updates send its weights alone, and it has buffers too ({min(buffers)}): pass "
        "actor_rollout_ref.rollout.load_format=auto, with which engines read them"
    )


def _torchvision_problem(source: Any) -> str | None:
    if source.model_type not in (*VISION_FAMILIES, "qwen3_5_text") or find_spec("torchvision") is not None:
        return None
    return (
        "vLLM's class of it imports torchvision, which is not installed: scripts/install.sh installs the "
        "version that was built with this torch (0.28.0), where it is to be had"
    )


def _family_problem(source: Any) -> str | None:
    if not hasattr(source, "vision_config") or source.model_type in VISION_FAMILIES:
        return None
    return (
        f"it reads pictures, and is of the family {source.model_type}: those of {', '.join(VISION_FAMILIES)} "
        "are proven"
    )


def _picture_problem(config: RunConfig, source: Any) -> str | None:
    """The reason why a policy that reads pictures cannot have this configuration, or None."""
    for role, frozen in config.frozen_policies.items():
        other = AutoConfig.from_pretrained(model_source(frozen.model_path))
        if (other.model_type, getattr(other, "image_token_id", None)) != (
            source.model_type,
            source.image_token_id,
        ):
            return (
                f"it reads pictures, and the {role} {frozen.model_path} is of the family {other.model_type}, "
                f"or has another placeholder: a {role} must read the same pictures"
            )
    policy, model = config.actor_rollout_ref, "actor_rollout_ref.model"
    adapters = policy.model.lora_rank and policy.model.target_modules == "all-linear"
    refused = {
        "exact mode: drop actor_rollout_ref.exact": policy.exact,
        f"rows that are padded: pass {model}.use_remove_padding=True": not policy.model.use_remove_padding,
        f"adapters in an engine: pass {model}.lora.merge=True": policy.model.adapter_rank,
        f"adapters of a tower that is frozen: pass {model}.exclude_modules='.*visual.*'": adapters
        and policy.actor.freeze_vision_tower
        and policy.model.exclude_modules is None,
        "a quantised engine: drop actor_rollout_ref.rollout.quantization": policy.rollout.quantization,
        "caches of old weights: pass async_training.on_update=recompute": config.async_training.on_update
        == "keep",
        "environments and tools: drop them": policy.rollout.converses,
        "a critic: choose an estimator without one, such as grpo": config.needs_critic,
        "a reward model: score with a function": config.reward.reward_model.enable,
        "a teacher: drop distillation": config.distillation.enabled,
        **{
            f"ranks that share a row: pass {fsdp_section(role)}.ulysses_sequence_parallel_size=1": size > 1
            for role, size in config.sequence_parallel_sizes.items()
        },
    }
    return next(
        (f"it reads pictures, which is not built with {name}" for name in refused if refused[name]), None
    )


def _critic_problem(source: Any) -> str | None:
    if type(source) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        return None
    return (
        f"transformers has no model of type {source.model_type} that gives each token a value: choose "
        "another critic.model.path, or an estimator without a critic"
    )


def has_state(config: Any) -> bool:
    """Whether some layers of a model with this ``config.json`` have a recurrent state."""
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return bool(getattr(known, "_is_stateful", False))


def _state_problem(config: RunConfig) -> str | None:
    """The reason why a policy with recurrent layers cannot have this configuration, or None."""
    policy, rollout = config.actor_rollout_ref, "actor_rollout_ref.rollout"
    if policy.exact:
        return "it has recurrent layers, which exact mode does not cover: drop actor_rollout_ref.exact"
    if policy.model.adapter_rank:
        return (
            "it has recurrent layers, beside which adapters in an engine are not proven: pass "
            "actor_rollout_ref.model.lora.merge=True"
        )
    if config.trainer.device != "cpu":
        return None
    if policy.rollout.dtype != "bfloat16":
        return (
            f"vLLM computes recurrent layers in bfloat16 alone on a CPU, got {rollout}.dtype="
            f"{policy.rollout.dtype}: pass {rollout}.dtype=bfloat16"
        )
    if policy.rollout.enable_prefix_caching:
        return (
            "vLLM keeps recurrent states of prefixes only beside prompts in chunks, which a CPU cannot "
            f"sample with a seed: pass {rollout}.enable_prefix_caching=False"
        )
    return None


def window_of(config: Any, longest: int) -> int | None:
    """The tokens that layers of a model with this ``config.json`` look back, the query itself included. None
    if none of them has a window that is shorter than ``longest`` tokens."""
    text = config.get_text_config()
    window: int | None = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"]
    return window if window is not None and "sliding_attention" in kinds and window < longest else None


def attention_problem(config: Any, longest: int) -> str | None:
    """The reason why a model with this ``config.json`` cannot be trained on sequences of ``longest`` tokens,
    or None.

    Its attention must be causal, full or, in the families of ``_WITH_WINDOWS``, within a window: no soft cap.
    Other layers are gated delta nets of the families of ``_WITH_STATE``.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    unsupported = kinds - {"full_attention", "sliding_attention"}
    if text.model_type in _WITH_STATE:
        unsupported.discard("linear_attention")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, cap, None) is not None:
            return f"its logits are soft-capped ({cap}={getattr(text, cap):g}), which is not built"
    for size, part in (
        ("num_kv_shared_layers", "keys of other layers"),
        ("hidden_size_per_layer_input", "embeddings of their own"),
    ):
        if getattr(text, size, None):
            return f"it has layers with {part} ({size}={getattr(text, size)}), which are not built"
    if unsupported:
        return f"it has layers of kind {', '.join(sorted(unsupported))}, which are not built"
    if has_state(config) and text.model_type not in _WITH_STATE:
        return f"it has recurrent layers of {text.model_type}, which are not built"
    if text.model_type in ("qwen2", "qwen3") and len(kinds) > 1:
        return "it is a Qwen with windows in some layers alone (max_window_layers), which vLLM does not serve"
    window = window_of(config, longest)
    if window is not None and text.model_type not in _WITH_WINDOWS:
        return (
            f"its attention looks back sliding_window={window} tokens, which is proven for "
            f"{', '.join(_WITH_WINDOWS)} alone, and sequences have up to {longest}: lower "
            f"data.max_prompt_length + data.max_response_length to {window}"
        )
    return None
