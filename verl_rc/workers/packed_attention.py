"""Attention over packed sequences: linear layers run on real tokens only, padding exists just around the attention
kernel."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

PACKED_ATTENTION = "verl_rc_packed_sdpa"


@dataclass(frozen=True)
class PackedLayout:
    """Where each packed token lies in a padded ``[num_sequences, max_length]`` grid."""

    grid_index: Tensor
    """int64 ``[N]``: ``row * max_length + position`` of every packed token."""
    position_ids: Tensor
    """int64 ``[N]``: position within the own sequence, restarting at 0."""
    num_sequences: int
    max_length: int

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> "PackedLayout":
        """Lay out sequences of ``lengths`` (int64 ``[S]``, tokens, each at least 1) one after the other."""
        if lengths.ndim != 1 or lengths.numel() == 0 or int(lengths.min()) < 1:
            raise ValueError(f"packing needs a list of sequence lengths >= 1, got {lengths.tolist()}.")
        num_sequences, max_length = lengths.numel(), int(lengths.max())
        rows = torch.repeat_interleave(torch.arange(num_sequences, device=lengths.device), lengths)
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(rows.numel(), device=lengths.device) - starts[rows]
        return cls(rows * max_length + positions, positions, num_sequences, max_length)


def packed_sdpa(  # noqa: PLR0913  (the signature transformers calls)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed_layout: PackedLayout | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sequence.

    ``query``, ``key``, ``value`` are ``[1, heads, N, head_dim]`` over packed tokens. Rows are padded on the right,
    where a
    causal mask alone keeps padding out of every real token's sight. Without a layout it is plain padded attention.
    Called by transformers through its ``AttentionInterface``, whose signature it must have.
    """
    grouped = key.shape[1] != query.shape[1]
    if packed_layout is None:
        causal = attention_mask is None and query.shape[2] > 1
        output = F.scaled_dot_product_attention(
            query, key, value, attention_mask, dropout, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        return output.transpose(1, 2).contiguous(), None
    rows, width, index = packed_layout.num_sequences, packed_layout.max_length, packed_layout.grid_index

    def to_grid(packed: Tensor) -> Tensor:
        heads, head_dim = packed.shape[1], packed.shape[3]
        grid = packed.new_zeros(rows * width, heads, head_dim).index_copy(0, index, packed[0].transpose(0, 1))
        return grid.view(rows, width, heads, head_dim).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        to_grid(query), to_grid(key), to_grid(value), dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=grouped
    )
    flat = output.transpose(1, 2).reshape(rows * width, output.shape[1], output.shape[3])
    return flat.index_select(0, index)[None], None


AttentionInterface.register(PACKED_ATTENTION, packed_sdpa)
