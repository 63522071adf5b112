"""Mergeable statistics, on numbers that can be checked by hand."""

import pytest
import torch

from verl_rc.metrics.mergeable import Extremes, Mean, Moments, Quotient


def test_moments_of_one_two_three() -> None:
    moments = Moments(total=6.0, square=14.0, count=3)
    assert (moments.value, moments.variance) == (2.0, pytest.approx(2 / 3))
    assert moments.sample_std == pytest.approx(1.0)


def test_nothing_has_moments_of_zero() -> None:
    nothing = Moments(0.0, 0.0, 0)
    assert (nothing.value, nothing.std, nothing.sample_std) == (0.0, 0.0, 0.0)


def test_a_mean_of_numbers_and_of_tensors() -> None:
    assert Mean(0.0, 0.0).value == 0.0
    assert Mean(3.0, 4.0).value == 0.75
    means = Mean(torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])).value
    assert means.tolist() == [0.75, 0.0]


def test_parts_add_up_with_all_their_sums() -> None:
    assert Mean(3.0, 4.0) + Mean(1.0, 0.0) == Mean(4.0, 4.0)
    assert Moments(1.0, 1.0, 1.0) + Moments(5.0, 2.0, 13.0) == Moments(total=6.0, count=3.0, square=14.0)


def test_a_quotient_and_its_error() -> None:
    # a = 1, 2, 3 and b = 2, 2, 2: the residuals a - b are -1, 0 and 1
    a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 2.0])
    sums = Quotient.from_sequences(a, b)
    quotient = Quotient(*(float(getattr(sums, name).sum()) for name in ("a", "b", "aa", "ab", "bb")))
    assert quotient.value == 1.0
    assert quotient.error == pytest.approx(2**0.5 / 6)
    assert quotient.z == pytest.approx(6 / 2**0.5)


def test_the_farthest_of_two_extremes() -> None:
    assert Extremes(largest=1.0, negated_smallest=3.0).farthest == 3.0
    assert Extremes(-float("inf"), -float("inf")).farthest == 0.0
