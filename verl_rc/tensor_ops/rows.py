"""Rows a few at a time, so that temporaries stay small."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_BLOCK_ELEMENTS = 1 << 16
"""Elements of a block whose temporaries stay in a CPU's cache."""


def row_slices(num_rows: int, width: int, elements: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows of ``width`` elements, each of at most ``elements`` of them or a single row.

    Without rows there is one empty slice, so that what is computed for the slices can always be put together.
    """
    step = max(1, elements // max(width, 1))
    for start in range(0, max(num_rows, 1), step):
        yield slice(start, min(start + step, num_rows))


def in_row_blocks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Applies a function of ``[B, T]`` tensors, which computes row by row, to a few rows at a time."""
    num_rows, width = tensors[0].shape
    slices = row_slices(num_rows, width, _BLOCK_ELEMENTS)
    return torch.cat([function(*(tensor[rows] for tensor in tensors)) for rows in slices])
