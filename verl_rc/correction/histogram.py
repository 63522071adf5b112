"""A mergeable histogram of log-ratios, log-spaced on both sides of 0, and percentiles read from it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verl_rc.correction.log_ratio import zeroed

SMALLEST = 1e-8
"""Log-ratios nearer to 0 count as 0."""
LARGEST = 20.0
"""Log-ratios further from 0 count as this far."""
BINS_PER_SIDE = 320
"""Neighbouring edges differ by 6.9 %, so a bin's geometric middle is within 3.5 % of whatever fell into it."""
NUM_BINS = 2 * BINS_PER_SIDE + 1
_LOG_WIDTH = math.log(LARGEST / SMALLEST) / BINS_PER_SIDE
HISTOGRAM_EDGES = tuple(
    [-SMALLEST * math.exp(_LOG_WIDTH * step) for step in range(BINS_PER_SIDE, -1, -1)]
    + [SMALLEST * math.exp(_LOG_WIDTH * step) for step in range(BINS_PER_SIDE + 1)]
)
"""Edges of the bins, ascending; nats."""


def log_ratio_histogram(values: Tensor, mask: Tensor) -> Tensor:
    """Counts float64 ``[NUM_BINS]`` of ``values`` (nats, any shape) where ``mask`` is True; no size limit, no host sync."""
    counted = zeroed(values, mask)
    steps = counted.abs().div_(SMALLEST).clamp_min_(0.5).log_().mul_(1.0 / _LOG_WIDTH).add_(1.0)
    index = steps.clamp_(0, BINS_PER_SIDE).copysign_(counted).long().add_(BINS_PER_SIDE).flatten()
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=values.device)
    counts.scatter_add_(0, index, index.new_ones(1).expand_as(index))
    counts[BINS_PER_SIDE] -= mask.numel() - mask.sum()
    return counts.double()


def bin_value(index: int) -> float:
    """The log-ratio a bin stands for: 0 for the middle one, else the geometric middle of its edges."""
    step = index - BINS_PER_SIDE
    if step == 0:
        return 0.0
    return math.copysign(SMALLEST * math.exp(_LOG_WIDTH * (abs(step) - 0.5)), step)


def percentile(counts: Sequence[float], percent: float) -> float:
    """The log-ratio below or at which ``percent`` of what was counted lies (nearest rank); NaN when nothing was counted."""
    rank = percent / 100 * math.fsum(counts)
    if not any(counts):
        return math.nan
    seen = 0.0
    for index, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return bin_value(index)
    return bin_value(max(index for index, count in enumerate(counts) if count))
