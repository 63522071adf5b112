"""A mergeable histogram of log-ratios, log-spaced on both sides of 0, and percentiles read from it."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

_BINS_PER_OCTAVE = 16
SMALLEST = 2.0**-25
"""Log-ratios nearer to 0 count as 0; 3e-8."""
LARGEST = 20.0
"""Log-ratios further from 0 count as this far."""
BINS_PER_SIDE = 29 * _BINS_PER_OCTAVE + 4
"""Edges divide every factor of two into 16 equal parts, so a bin's middle is within 3.1 % of whatever fell into it."""
NUM_BINS = 2 * BINS_PER_SIDE + 1


def _edge(step: int) -> float:
    octave, part = divmod(step, _BINS_PER_OCTAVE)
    return SMALLEST * 2.0**octave * (1.0 + part / _BINS_PER_OCTAVE)


HISTOGRAM_EDGES = tuple(
    [-_edge(step) for step in range(BINS_PER_SIDE, -1, -1)] + [_edge(step) for step in range(BINS_PER_SIDE + 1)]
)
"""Edges of the bins, ascending; nats."""
_TO_HALF = 2.0**11
"""Takes ``SMALLEST`` to the smallest normal number of float16."""
_PATTERNS, _BELOW = 1024, 6
"""First bits of a float16: sign, exponent and 4 of the mantissa; and how many are left."""


def log_ratio_histogram(values: Tensor, counted: Tensor) -> Tensor:
    """Counts float64 ``[NUM_BINS]`` of finite ``values`` (nats, any shape), of which those not ``counted`` (0, else 1) are 0.

    No size limit, no host sync. The bin is read from the first bits of the float16 nearest to a value.
    """
    bits = values.clamp(-LARGEST, LARGEST).mul_(_TO_HALF).half().view(torch.int16)
    pattern = bits.bitwise_right_shift_(_BELOW).bitwise_and_(_PATTERNS - 1).flatten().long()
    counts = torch.zeros(_PATTERNS, dtype=torch.int64, device=values.device)
    counts.scatter_add_(0, pattern, pattern.new_ones(1).expand_as(pattern))
    positive, negative = counts.double().view(2, -1)
    counts = torch.cat([_outwards(negative).flip(0), (positive + negative)[:_BINS_PER_OCTAVE].sum()[None], _outwards(positive)])
    counts[BINS_PER_SIDE] -= counted.numel() - counted.sum(dtype=torch.float64)
    return counts


def _outwards(patterns: Tensor) -> Tensor:
    """Counts of the bins of one side; ``LARGEST`` itself, which has a pattern of its own, counts in the last."""
    counts = patterns[_BINS_PER_OCTAVE : _BINS_PER_OCTAVE + BINS_PER_SIDE].clone()
    counts[-1] += patterns[_BINS_PER_OCTAVE + BINS_PER_SIDE]
    return counts


def bin_value(index: int) -> float:
    """The log-ratio a bin stands for: 0 for the middle one, else the geometric middle of its edges."""
    step = index - BINS_PER_SIDE
    if step == 0:
        return 0.0
    return math.copysign(math.sqrt(_edge(abs(step) - 1) * _edge(abs(step))), step)


def percentiles(counts: Sequence[float], percents: Sequence[float]) -> dict[float, float]:
    """By percent the log-ratio below or at which that share of what was counted lies (nearest rank); NaN: nothing was."""
    below = list(accumulate(counts))
    if not below[-1]:
        return dict.fromkeys(percents, math.nan)
    ranks = {percent: max(percent / 100 * below[-1], math.ulp(0.0)) for percent in percents}
    return {percent: bin_value(bisect_left(below, min(rank, below[-1]))) for percent, rank in ranks.items()}
