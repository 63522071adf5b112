"""Loading a transformer with a language-model or value head, and running it over packed sequences."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

from verl_rc.config.models import model_source
from verl_rc.workers.packed_attention import PACKED_ATTENTION, PackedLayout


def load_causal_lm(
    path: str, dtype: torch.dtype, gradient_checkpointing: bool = False, trust_remote_code: bool = False
) -> nn.Module:
    """Load a Hugging Face causal language model whose attention understands packed input.

    Raises ``ValueError`` when ``path`` looks like a folder but holds no model.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(source, **arguments)
    return _with_checkpointing(model, gradient_checkpointing)


def load_value_model(
    path: str, dtype: torch.dtype, gradient_checkpointing: bool = False, trust_remote_code: bool = False
) -> nn.Module:
    """Load a transformer with a scalar head: output 0 of a position is the value of what comes after it.

    A model without a value head (a language model) gets one of zeros, so that the first values are 0 instead of noise. Raises
    ``ValueError`` when ``path`` holds no model, or one whose head gives more than one number.
    """
    source, arguments = _model_source(path, dtype, trust_remote_code)
    config = arguments["config"]
    config.num_labels, config.classifier_dropout = 1, 0.0
    try:
        model, loading = AutoModelForTokenClassification.from_pretrained(source, output_loading_info=True, **arguments)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"critic.model.path must be a language model, or one with a value head of one output, got {path!r}: {error}"
        ) from error
    head = model.get_submodule("score")
    if any(name.startswith("score.") for name in loading["missing_keys"]):
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    return _with_checkpointing(model, gradient_checkpointing)


def _model_source(path: str, dtype: torch.dtype, trust_remote_code: bool) -> tuple[str, dict[str, Any]]:
    source = model_source(path)
    if path.startswith((".", "/", "~")) and not (Path(source) / "config.json").is_file():
        raise ValueError(
            f"a model's path must be a Hugging Face model folder with a config.json, got {path!r}. "
            "Give the folder of a model (scripts/make_tiny_model.py writes a small one) or a hub id."
        )
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    arguments = {
        "config": config,
        "dtype": dtype,
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    return source, arguments


def _with_checkpointing(model: nn.Module, enabled: bool) -> nn.Module:
    if enabled:
        checkpointed: Any = model
        checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def packed_logits(model: nn.Module, token_ids: Tensor, lengths: Tensor | list[int], keep: Tensor | None = None) -> Tensor:
    """Logits (or, of a value model, values) of packed sequences.

    ``token_ids`` is int64 ``[N]``, sequences one after the other; ``lengths`` int64 ``[S]`` their token counts (sum N);
    ``keep`` (int64 ``[K]``, optional) the packed positions whose logits are wanted. Returns ``[N, V]`` or ``[K, V]``.
    """
    layout = PackedLayout.from_lengths(torch.as_tensor(lengths, device=token_ids.device))
    if layout.grid_index.numel() != token_ids.numel():
        raise ValueError(f"lengths must sum to the number of tokens {token_ids.numel()}, got {layout.grid_index.numel()}.")
    selection = {} if keep is None else {"logits_to_keep": keep}
    output = model(
        input_ids=token_ids[None],
        position_ids=layout.position_ids[None],
        attention_mask=None,
        use_cache=False,
        packed_layout=layout,
        **selection,
    )
    return output.logits[0]


def padded_logits(model: nn.Module, token_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Logits ``[B, S, V]`` of right-padded sequences ``token_ids`` ``[B, S]`` (``use_remove_padding=False``).

    Padding lies on the right, so a causal mask alone keeps it out of sight of real tokens.
    """
    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp_min(0)
    return model(input_ids=token_ids, position_ids=position_ids, attention_mask=None, use_cache=False).logits
