"""A mergeable histogram of log-ratios, log-spaced on both sides of 0, and its percentiles."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from verl_rc.metrics.log_ratio_bins import (
    BINS_PER_OCTAVE,
    BINS_PER_SIDE,
    FIRST_EXPONENT,
    LARGEST,
    NUM_BINS,
    SMALLEST,
    bin_value,
)


def log_ratio_histogram(values: Tensor, members: Tensor) -> Tensor:
    """Counts float64 ``[NUM_BINS]`` of those finite ``values`` (nats, any shape) where the bool ``members``
    holds."""
    # |l| = mantissa * 2^exponent, the mantissa in [0.5, 1): equal on every device, where a logarithm may
    # round to either side of an edge, and ten times as fast as a search among the edges. The lower clamp is
    # for 0, whose exponent is 0.
    mantissa, exponent = torch.frexp(values.abs().clamp_(SMALLEST / 2, LARGEST))
    parts = (mantissa * (2 * BINS_PER_OCTAVE)).floor_() - (BINS_PER_OCTAVE - 1)
    steps = ((exponent - FIRST_EXPONENT) * BINS_PER_OCTAVE + parts).clamp_(0, BINS_PER_SIDE)
    bins = (BINS_PER_SIDE + steps * values.sign()).long()
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, bins.flatten(), members.long().flatten()).double()


def percentiles(counts: Sequence[float], percents: Sequence[float]) -> dict[float, float]:
    """Return by percent the log-ratio below or at which that share of the counts lies (nearest rank); empty
    without counts."""
    if not any(counts):
        return {}
    below = list(accumulate(counts))
    ranks = {percent: max(percent / 100 * below[-1], math.ulp(0.0)) for percent in percents}
    return {percent: bin_value(bisect_left(below, min(rank, below[-1]))) for percent, rank in ranks.items()}
