"""Which operations a language model computes with: PyTorch's, or in exact mode the engine's."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import AttentionInterface

from verl_rc.runtime.exact.trainer import exact_attention, exact_scores, use_engine_operations
from verl_rc.runtime.workers.attention import PACKED_ATTENTION, packed_sdpa
from verl_rc.tensor_ops import HiddenStateScores, scores_from_hidden_states

_EXACT_ATTENTION = "verl_rc_exact"


@dataclass(frozen=True)
class Operations:
    """The operations that exact mode exchanges."""

    attention: str = PACKED_ATTENTION
    """Name in transformers' ``AttentionInterface``."""
    score: Callable[..., HiddenStateScores] = scores_from_hidden_states
    exchange_layers: Callable[[nn.Module], nn.Module] = lambda model: model
    """Replaces layers of a model by exact ones; returns the model."""


def operations(exact: bool, compute_dtype: torch.dtype) -> Operations:
    """The operations of a model that computes in ``compute_dtype``, in exact mode or not.

    Raises ``InexactError`` where exact mode does not support the installed vLLM.
    """
    if not exact:
        return Operations()
    AttentionInterface.register(_EXACT_ATTENTION, exact_attention(packed_sdpa))
    return Operations(
        _EXACT_ATTENTION, exact_scores, partial(use_engine_operations, compute_dtype=compute_dtype)
    )
