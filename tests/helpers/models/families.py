"""Small models of families whose layers are not all full attention."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from verl_rc.records.batches import TokenBatch

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
_WITH_STATE: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,  # vLLM has no smaller one on a CPU
    "linear_value_head_dim": 128,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**_WITH_STATE, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": _WITH_STATE,
}
"""The same of families with recurrent layers, which engines compute in bfloat16 on a CPU."""
FULL: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "olmo2": {},
    "granite": {"logits_scaling": 2.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0},
    "smollm3": {},
    "glm4": {},
    "cohere": {},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
"""The same of families with full attention alone."""


def model_of(family: str, tied: bool = False, **further: Any) -> PreTrainedModel:
    """In float32, with biases, norms and gates that are not at their trivial first values."""
    sizes = {
        **_SIZES,
        **(FAMILIES | RECURRENT | FULL).get(family, {}),
        "tie_word_embeddings": tied,
        **further,
    }
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


LENGTHS = [(3, 37), (20, 13), (1, 1), (20, 8), (20, 25)]
"""Tokens of prompts and responses; the three prompts of 20 are the same."""


def tokens() -> TokenBatch:
    generator = torch.Generator().manual_seed(4)
    prompts = torch.randint(3, 250, (len(LENGTHS), 20), generator=generator)
    prompts[3], prompts[4] = prompts[1], prompts[1]
    return TokenBatch(
        prompts=prompts,
        prompt_lengths=torch.tensor([prompt for prompt, _ in LENGTHS]),
        responses=torch.randint(3, 250, (len(LENGTHS), 37), generator=generator),
        response_lengths=torch.tensor([response for _, response in LENGTHS]),
        batch_size=[len(LENGTHS)],
    )
