"""Sums and whitening over the True positions of a mask. Masked positions are cut by selection, so NaN there
is harmless."""

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of ``values`` (any shape) where ``mask`` (same shape, bool) is True; a scalar."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum()


def masked_row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """Sums over the last dimension of ``values`` ``[B, T]`` where ``mask`` is True; ``[B]``."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device)).sum(dim=-1)


def masked_whiten(values: Tensor, mask: Tensor) -> Tensor:
    """``(x - mean) / sqrt(var + 1e-8)`` over the True positions, 0 elsewhere; variance with Bessel's correction.

    With fewer than two True positions there is no variance, and the values are returned unscaled, less their mean.
    """
    count, outside = mask.sum(), ~mask
    centred = values.masked_fill(outside, 0.0)  # from here on in place: a fresh tensor costs more than the arithmetic
    mean = centred.sum(dim=-1).double().sum() / count.clamp_min(1)
    centred.sub_(mean.to(values.dtype)).masked_fill_(outside, 0.0)
    variance = torch.linalg.vecdot(centred, centred).double().sum() / (count - 1).clamp_min(1)
    scale = torch.where(count > 1, torch.rsqrt(variance + 1e-8), 1.0)
    return centred.mul_(scale.to(values.dtype))
