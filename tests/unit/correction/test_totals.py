"""Means, deviations and effective sample sizes from sums."""

import math

from verl_rc.correction.totals import RuleTotals, WeightSums, map_numbers
from verl_rc.metrics.mergeable import Extremes, Mean, Moments


def weights(*values: float) -> WeightSums[float]:
    moments = Moments(
        total=sum(w - 1 for w in values), square=sum((w - 1) ** 2 for w in values), count=len(values)
    )
    return WeightSums(moments, sum(w * w for w in values), Extremes(max(values), -min(values)))


def test_effective_sample_size() -> None:
    assert weights(1.0, 1.0, 1.0).effective_sample_size == 1.0
    assert weights(1.0, 0.0, 0.0, 0.0).effective_sample_size == 0.25
    assert weights(0.0, 0.0).effective_sample_size == 0.0


def test_means_of_nothing_are_zero() -> None:
    assert WeightSums(Moments(0.0, 0.0, 0.0), 0.0, Extremes(-math.inf, -math.inf)).mean == 0.0


def test_records_are_mapped_number_by_number_in_one_order() -> None:
    record = (
        RuleTotals(Moments(1, 2, 3), Extremes(4, 5), Moments(6, 7, 8), Extremes(9, 10)),
        {"b": Mean(11, 12), "a": Mean(13, 14)},
        None,
    )
    seen: list[tuple[int, bool]] = []
    doubled = map_numbers(lambda one, is_extreme: seen.append((one, is_extreme)) or 2 * one, record)
    assert seen == [(number, number in (4, 5, 9, 10)) for number in range(1, 15)]
    assert doubled[0].extremes == Extremes(8, 10)
    assert doubled[1:] == ({"b": Mean(22, 24), "a": Mean(26, 28)}, None)
