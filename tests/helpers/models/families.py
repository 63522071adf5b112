"""Small models of families whose layers are not all full attention."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

WINDOW = 8
_SIZES: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM's attention on a CPU has no smaller one
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
    "initializer_range": 0.1,
}
_ONE_OF_EACH = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "qwen3": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0},
    "olmo3": _ONE_OF_EACH,
    "gemma3_text": {**_ONE_OF_EACH, "query_pre_attn_scalar": 32},
    "gpt_oss": {**_ONE_OF_EACH, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
}
"""Values of ``model_type``, with what their configuration has beside the sizes."""
FULL: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "smollm3": {},
    "glm4": {},
    "cohere": {},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
"""The same of families with full attention alone."""


def model_of(family: str, tied: bool = False, **further: Any) -> PreTrainedModel:
    """In float32, with biases, norms and gates that are not at their trivial first values."""
    sizes = {**_SIZES, **(FAMILIES | FULL)[family], "tie_word_embeddings": tied, **further}
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    move(model, 0.2, [name for name, parameter in model.named_parameters() if parameter.ndim == 1])
    return model.float()


def move(model: PreTrainedModel, size: float, names: list[str]) -> None:
    """Add noise to these parameters."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name in names:
            parameters[name].add_(size * torch.randn_like(parameters[name]))
