"""Means, intervals and lines against numbers worked out by hand or another way."""

import math
import random

import pytest

from verl_rc.insight.run_folder import Series
from verl_rc.insight.verdict import estimates


def series(values):
    return Series(list(range(1, len(values) + 1)), list(values))


def test_a_line_through_points_on_it():
    line = estimates.fit_line([0, 1, 2, 5], [1, 3, 5, 11])
    assert line is not None
    assert (line.slope, line.intercept, line.r_squared) == pytest.approx((2, 1, 1))


def test_r_squared_is_the_squared_correlation():
    # x = 1 2 3 4, y = 2 1 4 3: covariance 3, both sums of squares 5: r = 0.6.
    line = estimates.fit_line([1, 2, 3, 4], [2, 1, 4, 3])
    assert line is not None
    assert line.r_squared == pytest.approx(0.36)


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3]), ([1, 2, 3], [2, 2, 2])])
def test_no_line_without_variation(x, y):
    assert estimates.fit_line(x, y) is None


@pytest.mark.parametrize(
    ("length", "size"), [(0, 0), (1, 1), (2, 1), (6, 2), (11, 3), (12, 4), (40, 4), (100, 10), (101, 11)]
)
def test_first_and_last_tenth(length, size):
    values = series(range(length))
    assert list(estimates.first_tenth(values).values) == list(range(size))
    assert list(estimates.last_tenth(values).values) == list(range(length - size, length))


def test_the_interval_covers_the_mean_of_independent_numbers_nine_times_in_ten():
    chance, covered = random.Random(7), 0
    for _ in range(300):
        low, high = estimates.bootstrap_interval([chance.gauss(5, 1) for _ in range(80)])
        covered += low <= 5 <= high
    assert 0.80 <= covered / 300 <= 0.95  # 20 blocks make it a little too narrow


def test_the_interval_is_wider_where_neighbours_depend_on_each_other():
    chance = random.Random(7)
    independent = [chance.gauss(0, 1) for _ in range(200)]
    dependent = [math.sqrt(10) * math.fsum(independent[i : i + 10]) / 10 for i in range(190)]
    narrow, wide = estimates.bootstrap_interval(independent), estimates.bootstrap_interval(dependent)
    assert wide[1] - wide[0] > 1.7 * (narrow[1] - narrow[0])


def test_no_interval_of_few_numbers_and_no_width_of_equal_ones():
    assert estimates.bootstrap_interval([1.0, 2.0, 3.0]) is None
    assert estimates.bootstrap_interval([2.5] * 9) == (2.5, 2.5)


def test_a_change_is_clear_when_its_interval_leaves_zero():
    assert estimates.change_of(series([0.0, 1.0] * 20)).is_clear is False
    rising = estimates.change_of(series([step + (step % 2) for step in range(40)]))
    assert rising.is_clear
    assert rising.difference == pytest.approx(36)  # steps 1 to 4 against 37 to 40
    assert estimates.change_of(series(range(11))) is None


def test_a_condition_is_confirmed_by_two_steps_in_a_row():
    values = series([0, 9, 0, 9, 9, 0, 9])
    assert estimates.confirm(values, lambda value: value > 5) == estimates.Confirmation((4, 5), 4)
    assert estimates.confirm(series([9, 0, 9]), lambda value: value > 5) is None
