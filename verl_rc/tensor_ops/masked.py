"""Masked sums and whitening, row blocks, numbers of groups and turns, values put in their places. Masked
positions are removed by selection, not by multiplication with 0, so NaN there is harmless."""

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` (any shape) where ``mask`` (same shape, bool) is True; a scalar."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum()


def masked_row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the last dimension of ``values`` ``[B, T]`` where ``mask`` is True; ``[B]``."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(dim=-1)


_AT_ONCE = 1 << 20
_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative size of what a few operations in float32 leave: four steps of the largest value."""


def is_rounding(spread: Tensor, size: Tensor) -> Tensor:
    """Whether numbers that are ``spread`` apart, the largest of which has the magnitude ``size``, are equal
    but for float32's rounding; bool.

    Dividing by such a spread would make a signal of it. Rewards come in float32.
    """
    return (spread <= _ROUNDING * size) & size.isfinite()


def masked_whiten(values: Tensor, mask: Tensor, minuends: Tensor | None = None) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over the True positions of ``mask``, 0 elsewhere; variance with
    Bessel's correction. Summed in float64. All tensors have one shape, which may be any.

    All 0 with fewer than two True positions, and where the values differ by rounding alone. ``minuends``
    ``[B, T]``: the numbers that the values are differences of, whose magnitude is that of the rounding. None
    if the values themselves.
    """
    if values.numel() == 0:
        return values.clone()
    count, outside = mask.sum(), ~mask
    centred = values.masked_fill(
        outside, 0.0
    )  # from here on in place: a fresh tensor costs more than the arithmetic
    mean = centred.sum(dim=-1, dtype=torch.float64).sum() / count.clamp_min(1)
    rounded_mean = mean.to(values.dtype)
    smallest, largest = centred.masked_fill_(outside, rounded_mean).aminmax()
    # The difference of close numbers is not rounded, so what the mean's rounding left can be taken off behind
    # it.
    centred.sub_(rounded_mean).sub_((mean - rounded_mean).to(values.dtype)).masked_fill_(outside, 0.0)
    # In float64, but never the whole batch at once.
    squares = [part.double().square().sum() for part in centred.flatten().split(_AT_ONCE)]
    variance = torch.stack(squares).sum() / (count - 1).clamp_min(1)
    size = torch.maximum(largest.abs(), smallest.abs())
    if minuends is not None:
        size = torch.maximum(size, minuends.masked_fill(outside, 0.0).abs_().amax())
    scale = torch.rsqrt(variance + 1e-8).masked_fill(is_rounding(largest - smallest, size), 0.0)
    return centred.mul_(scale.to(values.dtype))


def gathered_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]`` of ``[N, …]`` for an index (int64 ``[K]``) that may repeat.

    Gradients at one place are summed in float32 at least: a sum of many in bfloat16 loses some.
    """
    if values.dtype not in (torch.bfloat16, torch.float16):
        return values.index_select(0, index)
    rows: Tensor = _GatheredRows.apply(values, index)  # type: ignore[no-untyped-call]
    return rows


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = values.shape
        return values.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        total = gradient.new_zeros(ctx.shape, dtype=torch.float32).index_add_(0, index, gradient.float())
        return total.to(gradient.dtype), None


def placed(values: Tensor, mask: Tensor) -> Tensor:
    """``values`` ``[K, …]`` where ``mask`` (bool ``[*S]``) has its K places, row by row; ``[*S, …]``, 0
    elsewhere."""
    grid = torch.zeros(*mask.shape, *values.shape[1:], dtype=values.dtype, device=values.device)
    # masked_scatter: an assignment by a boolean index would make the host wait for the number of tokens.
    return grid.masked_scatter(mask.view(*mask.shape, *(1,) * (values.ndim - 1)), values)


def turn_numbers(response_mask: Tensor) -> Tensor:
    """int64 ``[B, T]``: number of the turn, from 0, that a response token belongs to. A turn is a run of
    response tokens; elsewhere stands the number of the turn before, or 0."""
    mask = response_mask.bool()
    begins = mask & ~pad(mask[:, :-1], (1, 0))
    return (begins.cumsum(dim=-1) - 1).clamp_min_(0)


def row_slices(num_rows: int, width: int, elements: int) -> Iterator[slice]:
    """Slices that cover ``num_rows`` rows of ``width`` elements, each with at most ``elements`` elements or a
    single row.

    Without rows there is one empty slice, so that the results of the slices can always be concatenated.
    """
    step = max(1, elements // max(width, 1))
    for start in range(0, max(num_rows, 1), step):
        yield slice(start, min(start + step, num_rows))


def group_numbers(group_ids: Tensor | Sequence[Hashable], device: torch.device) -> Tensor:
    """int64 ``[B]``: a number in [0, B) for each row, the same for rows whose id is the same. No host sync
    for tensors."""
    if not isinstance(group_ids, Tensor):
        numbers: dict[Hashable, int] = {}
        return torch.tensor(
            [numbers.setdefault(name, len(numbers)) for name in group_ids], dtype=torch.int64, device=device
        )
    # torch.unique would do, but its result has a size that only the device knows: the host would wait for it.
    ordered, order = group_ids.to(device).sort()
    starts = torch.ones_like(ordered, dtype=torch.bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    return torch.empty_like(order).scatter(0, order, starts.cumsum(0) - 1)
