"""Means, deviations and effective sample sizes from sums."""

import pytest

from verl_rc.correction.moments import Moments, Numbers, effective_sample_size


def test_moments_of_one_two_three() -> None:
    moments = Moments(total=6.0, square=14.0, count=3)
    assert (moments.mean, moments.variance) == (2.0, pytest.approx(2 / 3))
    assert moments.sample_std == pytest.approx(1.0)


def test_nothing_has_moments_of_zero() -> None:
    nothing = Moments(0.0, 0.0, 0)
    assert (nothing.mean, nothing.std, nothing.sample_std) == (0.0, 0.0, 0.0)


def test_effective_sample_size() -> None:
    assert effective_sample_size(total=3.0, square=3.0, count=3) == 1.0
    assert effective_sample_size(total=1.0, square=1.0, count=4) == 0.25
    assert effective_sample_size(total=0.0, square=0.0, count=4) == 0.0


def test_extremes_of_nothing_are_zero() -> None:
    numbers = Numbers({}, {"x.max": float("-inf"), "x.negated_min": float("-inf")}, [])
    assert numbers.extremes("", "x") == {"max": 0.0, "min": 0.0}
