"""How heavy the tail of the weights is: the shape of a generalised Pareto distribution, read from a histogram."""

import math
from collections.abc import Sequence

from verl_rc.correction.histogram import HISTOGRAM_EDGES, SMALLEST, bin_value

FEWEST_IN_TAIL = 5
_PRIOR_DRAWS, _PRIOR_SHAPE = 10, 0.5


def pareto_k(counts: Sequence[float]) -> float | None:
    """The shape k of the upper tail of ``exp(l)`` for the log-ratios in a histogram; None when the tail is too short to tell.

    The tail are the ``min(n / 5, 3 sqrt(n))`` largest of n, rounded up to whole bins; k is fitted by Zhang and Stephens (2009)
    and drawn towards 1/2 by ten prior draws (Pareto-smoothed importance sampling: Vehtari et al., arXiv:1507.02646). Moments of
    order 1/k and more do not exist: above 0.5 the weights have no variance, above 0.7 averages of practical size are unreliable.
    A histogram can be summed over micro-batches and ranks, which a list of the largest weights cannot; it knows l to 3.1 %.
    """
    total = math.fsum(counts)
    wanted = math.ceil(min(total / 5, 3 * math.sqrt(total)))
    tail, seen = [], 0.0
    for index in range(len(counts) - 1, -1, -1):
        if seen >= wanted:
            break
        if counts[index]:
            tail.append(index)
            seen += counts[index]
    if seen < FEWEST_IN_TAIL or len(tail) < 2 or seen >= total:
        return None
    largest, bound = bin_value(tail[0]), _lower_edge(tail[-1])
    excesses = [math.exp(bin_value(index) - largest) - math.exp(bound - largest) for index in reversed(tail)]
    shape = _generalised_pareto_shape(excesses, [counts[index] for index in reversed(tail)])
    return (seen * shape + _PRIOR_DRAWS * _PRIOR_SHAPE) / (seen + _PRIOR_DRAWS)


def _lower_edge(index: int) -> float:
    middle = len(HISTOGRAM_EDGES) // 2
    if index == middle:
        return -SMALLEST
    return HISTOGRAM_EDGES[index]


def _generalised_pareto_shape(excesses: Sequence[float], counts: Sequence[float]) -> float:
    """Zhang and Stephens (2009), Technometrics 51: the mean of a profile likelihood on a grid, for ascending values."""
    number = math.fsum(counts)
    grid = 30 + int(math.sqrt(number))
    quartile = _value_at_rank(excesses, counts, math.floor(number / 4 + 0.5))
    slopes = [1 / excesses[-1] + (1 - math.sqrt(grid / (step - 0.5))) / (3 * quartile) for step in range(1, grid + 1)]

    def shape_of(slope: float) -> float:
        return math.fsum(n * math.log1p(-slope * x) for x, n in zip(excesses, counts, strict=True)) / number

    shapes = [shape_of(slope) for slope in slopes]
    likelihoods = [
        number * (math.log(-slope / shape) - shape - 1) if slope * shape < 0 else -math.inf
        for slope, shape in zip(slopes, shapes, strict=True)
    ]
    best = max(likelihoods)
    weights = [math.exp(likelihood - best) for likelihood in likelihoods]
    return shape_of(math.fsum(w * slope for w, slope in zip(weights, slopes, strict=True)) / math.fsum(weights))


def _value_at_rank(values: Sequence[float], counts: Sequence[float], rank: int) -> float:
    seen = 0.0
    for value, count in zip(values, counts, strict=True):
        seen += count
        if seen >= rank:
            return value
    return values[-1]
