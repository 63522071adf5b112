"""A mergeable histogram of log-ratios, log-spaced on both sides of 0, and what is read from it: percentiles
and the tail."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from verl_rc.metrics.bounds import PLAUSIBLE_NOISE
from verl_rc.metrics.log_ratio_bins import (
    BINS_PER_OCTAVE,
    BINS_PER_SIDE,
    FIRST_EXPONENT,
    HISTOGRAM_EDGES,
    LARGEST,
    NUM_BINS,
    SMALLEST,
    bin_value,
)


def log_ratio_histogram(values: Tensor, members: Tensor) -> Tensor:
    """Counts float64 ``[NUM_BINS]`` of those finite ``values`` (nats, any shape) where ``members`` is 1 and
    not 0."""
    # |l| = mantissa * 2^exponent, the mantissa in [0.5, 1): exact on every device, where a logarithm may
    # round to either side of an edge, and ten times as fast as a search among the edges. The lower clamp is
    # for 0, whose exponent is 0.
    mantissa, exponent = torch.frexp(values.abs().clamp_(SMALLEST / 2, LARGEST))
    parts = (mantissa * (2 * BINS_PER_OCTAVE)).floor_() - (BINS_PER_OCTAVE - 1)
    steps = ((exponent - FIRST_EXPONENT) * BINS_PER_OCTAVE + parts).clamp_(0, BINS_PER_SIDE)
    bins = (BINS_PER_SIDE + steps * values.sign()).long()
    counts = torch.zeros(NUM_BINS, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, bins.flatten(), members.long().flatten()).double()


def percentiles(counts: Sequence[float], percents: Sequence[float]) -> dict[float, float]:
    """Return by percent the log-ratio below or at which that share of the counts lies (nearest rank); NaN
    without counts."""
    below = list(accumulate(counts))
    if not below[-1]:
        return dict.fromkeys(percents, math.nan)
    ranks = {percent: max(percent / 100 * below[-1], math.ulp(0.0)) for percent in percents}
    return {percent: bin_value(bisect_left(below, min(rank, below[-1]))) for percent, rank in ranks.items()}


def pareto_k(counts: Sequence[float]) -> float | None:
    """The shape k of the upper tail of ``exp(l)`` for the log-ratios in a histogram; None when the tail is
    too short to tell.

    None, too, when rounding of float32 alone makes the tail: k tells its shape, not its size, and such
    weights are all 1.

    The tail is the ``min(n / 5, 3 sqrt(n))`` largest of n, rounded up to whole bins; k is fitted by Zhang and
    Stephens (2009) and drawn towards 1/2 by ten prior draws (Pareto-smoothed importance sampling: Vehtari et
    al., arXiv:1507.02646). Moments of order 1/k and more do not exist: above 0.5 the weights have no
    variance, above 0.7 averages of practical size are unreliable.
    """
    # From a histogram, which can be summed over micro-batches and ranks as a list of the largest weights
    # cannot.
    total = math.fsum(counts)
    tail, size = list[int](), 0.0
    target = math.ceil(min(total / 5, 3 * math.sqrt(total)))
    for index in reversed(range(len(counts))):
        if counts[index] and size < target:
            tail.append(index)
            size += counts[index]
    if size < 5 or len(tail) < 2 or size >= total or bin_value(tail[0]) < PLAUSIBLE_NOISE["float32"]:
        return None
    bound = -SMALLEST if tail[-1] == BINS_PER_SIDE else HISTOGRAM_EDGES[tail[-1]]
    largest = bin_value(tail[0])  # weights relative to it: exp cannot overflow
    excesses = [math.exp(bin_value(index) - largest) - math.exp(bound - largest) for index in reversed(tail)]
    shape = _generalised_pareto_shape(excesses, [counts[index] for index in reversed(tail)])
    return (size * shape + 10 * 0.5) / (size + 10)


def _generalised_pareto_shape(excesses: Sequence[float], counts: Sequence[float]) -> float:
    """Zhang and Stephens (2009), Technometrics 51: the mean of a profile likelihood on a grid, for ascending
    values."""
    below = list(accumulate(counts))
    number = below[-1]
    grid = 30 + int(math.sqrt(number))
    quartile = excesses[bisect_left(below, math.floor(number / 4 + 0.5))]
    slopes = [
        1 / excesses[-1] + (1 - math.sqrt(grid / (step - 0.5))) / (3 * quartile)
        for step in range(1, grid + 1)
    ]

    def shape_of(slope: float) -> float:
        return math.fsum(n * math.log1p(-slope * x) for x, n in zip(excesses, counts, strict=True)) / number

    shapes = [shape_of(slope) for slope in slopes]
    likelihoods = [
        number * (math.log(-slope / shape) - shape - 1) if slope * shape < 0 else -math.inf
        for slope, shape in zip(slopes, shapes, strict=True)
    ]
    best = max(likelihoods)
    weights = [math.exp(likelihood - best) for likelihood in likelihoods]
    return shape_of(
        math.fsum(w * slope for w, slope in zip(weights, slopes, strict=True)) / math.fsum(weights)
    )
