"""The bins in which log-ratios are counted, log-spaced on both sides of 0; pure, so that every reader of a
histogram shares them."""

import math
from functools import cache

from verl_rc.metrics.bounds import LOG_RATIO_BOUND

BINS_PER_OCTAVE = 16
FIRST_EXPONENT = -24
SMALLEST, LARGEST = 0.5 * 2.0**FIRST_EXPONENT, LOG_RATIO_BOUND
"""Log-ratios nearer to 0 than 3e-8 count as 0, and those beyond the bound as at it."""
BINS_PER_SIDE = 29 * BINS_PER_OCTAVE + 4
"""Edges divide every factor of two into 16 equal parts, so a bin's middle is within 3.1 % of every value in
it."""
NUM_BINS = 2 * BINS_PER_SIDE + 1


def _edge(step: int) -> float:
    # Linear within an octave: sums of powers of two, the same on every machine, as powers of 2^(1/16) are
    # not.
    octave, part = divmod(step, BINS_PER_OCTAVE)
    return SMALLEST * 2.0**octave * (1.0 + part / BINS_PER_OCTAVE)


HISTOGRAM_EDGES = tuple(
    [-_edge(step) for step in range(BINS_PER_SIDE, -1, -1)]
    + [_edge(step) for step in range(BINS_PER_SIDE + 1)]
)
"""Edges of the bins, ascending; nats."""


@cache
def bin_value(index: int) -> float:
    """The log-ratio a bin stands for: 0 for the middle one, else the geometric middle of its edges."""
    step = index - BINS_PER_SIDE
    if step == 0:
        return 0.0
    return math.copysign(math.sqrt(_edge(abs(step) - 1) * _edge(abs(step))), step)
