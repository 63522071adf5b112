"""Which models can be trained."""

from typing import Any

from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

from verl_rc.config.models import model_source
from verl_rc.config.run import FSDP_SECTIONS, RunConfig
from verl_rc.runtime.workers.experts import experts_problem

_WITH_WINDOWS = ("mistral", "qwen2", "qwen3", "olmo3", "gemma3_text", "gpt_oss")
"""Values of ``model_type`` whose windows count the query, and whose engine was compared with the trainer."""


def unsupported_model(config: RunConfig, path: str, trust_remote_code: bool) -> str | None:
    """The reason why the model at ``path`` cannot be trained or score as a frozen policy, by the attention
    and experts in its ``config.json``; None when it can."""
    policy = config.actor_rollout_ref
    trained = {
        "actor": policy.model.path,
        "critic": config.critic.model.path,
        **{role: frozen.model_path for role, frozen in config.frozen_policies.items()},
    }
    if path not in trained.values():
        return None
    source = AutoConfig.from_pretrained(model_source(path), trust_remote_code=trust_remote_code)
    problems = [
        attention_problem(source, config.longest_sequence),
        experts_problem(config, path, source),
    ]
    window = window_of(source, config.longest_sequence)
    if policy.exact and path == policy.model.path and window is not None:
        problems.append(
            f"exact mode is not built for attention that looks back sliding_window={window} tokens: drop "
            f"actor_rollout_ref.exact, or lower data.max_prompt_length + data.max_response_length to {window}"
        )
    if config.needs_critic and path == trained["critic"]:
        known = trust_remote_code or type(source) in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        problems.append(
            None
            if known
            else f"transformers has no model of type {source.model_type} that gives each token a "
            "value: choose another critic.model.path, or an estimator without a critic"
        )
    if quantised := getattr(source, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        problems.append(
            f"its weights are stored quantised ({method}), which cannot be trained: write them in bfloat16 "
            "first, of gpt-oss with transformers' Mxfp4Config(dequantize=True) and save_pretrained"
        )
    for role, size in config.sequence_parallel_sizes.items():
        if trained[role] != path or size == 1:
            continue
        if source.get_text_config().model_type == "gpt_oss":
            problems.append(
                "its attention has sinks, which ranks that share heads do not divide: pass "
                f"{FSDP_SECTIONS[role]}.ulysses_sequence_parallel_size=1"
            )
        if (heads := source.get_text_config().num_attention_heads) % size:
            largest = max(
                count for count in range(1, size) if heads % count == 0 and config.num_ranks % count == 0
            )
            problems.append(
                f"{FSDP_SECTIONS[role]}.ulysses_sequence_parallel_size={size} must divide its {heads} "
                f"attention heads: pass {largest}, and lengths whose part of a row then fits"
            )
    head, vocabulary = config.algorithm.rollout_correction.head_tokens, source.get_text_config().vocab_size
    if path == policy.model.path and head > vocabulary:
        problems.append(
            f"algorithm.rollout_correction.score_centering.top_k={head} must be at most the {vocabulary} "
            f"tokens of its vocabulary: pass top_k={vocabulary}"
        )
    return next((problem for problem in problems if problem is not None), None)


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

    Its attention must be causal, full or, in the families of ``_WITH_WINDOWS``, within a window: no soft cap,
    no other kind of layer.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    unsupported = sorted(kinds - {"full_attention", "sliding_attention"})
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(text, cap, None) is not None:
            return f"its logits are soft-capped ({cap}={getattr(text, cap):g}), which is not built"
    if unsupported:
        return f"it has layers of kind {', '.join(unsupported)}, which are not built"
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
