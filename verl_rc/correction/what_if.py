"""What another threshold would have done to the rows just seen, read from the histograms of full diagnostics."""

import math

from verl_rc.correction.histogram import bin_value
from verl_rc.correction.moments import Numbers

_HISTOGRAM_OF_RULE = {"token_k1": 0, "seq_sum_k1": 1, "seq_mean_k1": 2}


def acceptance(numbers: Numbers, rule: str, lower: float, upper: float) -> float:
    """Share of tokens (``token_k1``) or rows (``seq_sum_k1``, ``seq_mean_k1``) with a ratio train/rollout in [lower, upper].

    Log-ratios are known to 3.1 %. NaN when nothing was measured. Raises ``ValueError`` for other rules, for bounds that are not
    0 < lower <= upper, and without full diagnostics.
    """
    if not 0 < lower <= upper:
        raise ValueError(f"bounds on a ratio must be 0 < lower <= upper; got {lower} and {upper}")
    counts = _counts(numbers, rule)
    low, high = math.log(lower), math.log(upper)
    inside = math.fsum(count for index, count in enumerate(counts) if low <= bin_value(index) <= high)
    return inside / math.fsum(counts) if any(counts) else math.nan


def bound_for_acceptance(numbers: Numbers, rule: str, share: float) -> float:
    """The smallest u for which ``rule`` with bounds 1/u to u would have accepted at least ``share`` of the tokens or rows.

    Thresholds set by the acceptance they lead to follow the drift that fixed ones run into. Known to 3.1 % of ln u; NaN when
    nothing was measured. Raises ``ValueError`` for other rules, a share outside (0, 1], and without full diagnostics.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share to accept must be in (0, 1]; got {share}")
    counts = _counts(numbers, rule)
    if not any(counts):
        return math.nan
    wanted, seen, farthest = share * math.fsum(counts), 0.0, 0.0
    middle = len(counts) // 2
    for distance in range(middle + 1):
        here = {middle - distance, middle + distance}
        count = math.fsum(counts[index] for index in here)
        if count:
            seen, farthest = seen + count, bin_value(middle + distance)
        if seen >= wanted * (1 - 1e-12):
            break
    return math.exp(farthest)


def _counts(numbers: Numbers, rule: str) -> list[float]:
    if rule not in _HISTOGRAM_OF_RULE:
        raise ValueError(f"histograms answer for {', '.join(_HISTOGRAM_OF_RULE)}; got {rule!r}")
    if not numbers.histograms:
        raise ValueError("histograms are measured with algorithm.rollout_correction.diagnostics=full only; it was core")
    return numbers.histograms[_HISTOGRAM_OF_RULE[rule]]
