"""Response tokens next to each other: packing out of, and back into, positions with gaps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK = 64
_BLOCK_ELEMENTS = 2**16


@dataclass(frozen=True)
class ResponseOrder:
    """Maps each position to the number of its response token in the row.

    A position outside the mask (tool output, padding) maps to the response token before it, or to the first one when
    there is none before it: what happens there is owed to that token.

    Attributes:
        mask: [B, T], bool; the response tokens.
        slot: [B, T], int64; number of the response token within the row.
    """

    mask: Tensor
    slot: Tensor

    @classmethod
    def from_mask(cls, response_mask: Tensor) -> ResponseOrder:
        """Numbers the response tokens of each row from 0."""
        mask = response_mask.bool()
        return cls(mask, (mask.cumsum(dim=-1) - 1).clamp_(min=0))

    def pack(self, values: Tensor) -> Tensor:
        """Moves the values of response tokens to the left of the row, without gaps; 0 elsewhere."""
        return self._scatter(values.where(self.mask, 0))

    def pack_rewards(self, rewards: Tensor) -> Tensor:
        """Moves rewards to the left like `pack`, crediting one outside the mask to the response token before it.

        Nothing finite is lost unless the row has no response token at all; NaN and infinities outside the mask are.
        """
        return self._scatter(countable_rewards(rewards, self.mask))

    def unpack(self, packed: Tensor) -> Tensor:
        """Moves packed values back to their positions; 0 outside the mask."""
        return packed.gather(-1, self.slot).where(self.mask, 0)

    def _scatter(self, values: Tensor) -> Tensor:
        return torch.zeros_like(values).scatter_add(-1, self.slot, values)


def countable_rewards(rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Sets NaN and infinities outside the response to 0 and leaves everything else, [B, T]."""
    return torch.where(response_mask, rewards, rewards.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))


def discounted_suffix_sums(terms: Tensor, discount: float) -> Tensor:
    """Solves x_t = b_t + c · x_{t+1} along the last dimension, with x = 0 past its end.

    Blocks of 64 positions are one matrix product with c^(j − i); the blocks' first values obey the same recursion with
    c^64, so the function calls itself on them. No loop over time: log_64(T) steps.

    Args:
        terms: [B, T], b.
        discount: c, in [0, 1].

    Returns:
        x: [B, T], in the unit of `terms`.
    """
    rows, length = terms.shape
    chunk = min(_CHUNK, max(length, 1))
    padded = torch.nn.functional.pad(terms, (0, -length % chunk))
    blocks = padded.view(rows, padded.shape[1] // chunk, chunk)
    steps = torch.arange(chunk, device=terms.device)
    gap = steps.unsqueeze(1) - steps
    powers = torch.full_like(gap, discount, dtype=terms.dtype).pow(gap.clamp(min=0)) * (gap >= 0)
    sums = blocks @ powers
    if blocks.shape[1] > 1:
        starts = discounted_suffix_sums(sums[:, :, 0], discount**chunk)
        following = torch.nn.functional.pad(starts[:, 1:], (0, 1))
        decay = torch.full_like(steps, discount, dtype=terms.dtype).pow(chunk - steps)
        sums.addcmul_(following.unsqueeze(-1), decay)
    return sums.reshape(padded.shape)[:, :length]


def in_row_blocks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies a function of [B, T] tensors to a few rows at a time, so that its temporaries stay in the cache."""
    rows = max(1, _BLOCK_ELEMENTS // max(tensors[0].shape[-1], 1))
    blocks = zip(*(torch.split(tensor, rows) for tensor in tensors), strict=True)
    return torch.cat([function(*block) for block in blocks])
