"""Layers with a recurrent state over packed sequences: each sequence begins with a state of its own."""

from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.runtime.workers.packed_layout import PackedLayout
from verl_rc.tensor_ops import gathered_rows

_LAYERS = "GatedDeltaNet"
"""The class name of a gated delta net (arXiv:2412.06464) ends with this."""


def separate_sequences(model: nn.Module) -> nn.Module:
    """``model``, whose recurrent layers compute each packed sequence from a state of zeros.

    The layers are causal, so that padding on the right changes no token. A shared prefix is computed again
    for each sequence, in these layers alone.
    """
    for layer in model.modules():
        if type(layer).__name__.endswith(_LAYERS):
            layer.forward = _separately(layer.forward)
    return model


def _separately(plain: Any) -> Any:
    """A recurrent layer's forward pass ``plain`` for packed sequences."""

    def forward(
        hidden_states: Tensor, *arguments: Any, packed_layout: PackedLayout | None = None, **options: Any
    ) -> Any:
        """Outputs ``[1, N, width]`` of packed tokens. Without a layout rows are padded on the right."""
        if packed_layout is None:
            return plain(hidden_states, *arguments, **options)
        packed = hidden_states[0]
        outputs = torch.empty_like(packed)
        for grid in packed_layout.sequences:
            rows = gathered_rows(packed, grid.tokens.flatten()).view(*grid.tokens.shape, -1)
            computed = plain(rows, *arguments, **options).flatten(0, 1)
            outputs = outputs.index_copy(0, grid.own_tokens, computed.index_select(0, grid.own))
        return outputs[None]

    return forward
