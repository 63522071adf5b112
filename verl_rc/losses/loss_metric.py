"""The record in which losses report numbers: sums that add up over micro-batches and ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.tensor_ops import masked_sum


@dataclass(frozen=True)
class LossMetric:
    """One reported mean, kept as its two sums so that it can be reduced exactly.

    Add the records of all micro-batches and ranks, then divide once: ``mean = Σ numerator / Σ denominator``.

    Attributes:
        numerator: 0-d float64, detached; the sum of the measured quantity, in that quantity's unit.
        denominator: 0-d float64, detached; the number of tokens or rows that were summed.
    """

    numerator: Tensor
    denominator: Tensor

    def __add__(self, other: LossMetric) -> LossMetric:
        """Merges two disjoint parts of a batch."""
        return LossMetric(self.numerator + other.numerator, self.denominator + other.denominator)

    def mean(self) -> Tensor:
        """Returns the mean as a 0-d tensor; 0 when nothing was counted."""
        return self.numerator / self.denominator.clamp(min=1)


def token_metric(values: Tensor, mask: Tensor) -> LossMetric:
    """Sums `values` over the tokens in `mask`.

    Args:
        values: [B, T], any unit; booleans count as 0 and 1.
        mask: [B, T] bool.
    """
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    return LossMetric(masked_sum(values, mask).to(torch.float64), mask.sum().to(torch.float64))
