"""Metric records, and their exact reduction."""

import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.metrics import Mean, Metric, Reduction, reduce_metrics


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_refuses_counts_that_no_mean_can_use(weight):
    with pytest.raises(ValueError, match=r"count of metric 'actor/entropy' must be finite and at least 0"):
        Metric("actor/entropy", Mean(0.84, weight))


def test_a_mean_is_reduced_as_a_mean_only():
    with pytest.raises(TypeError, match="metric 'x' must be a number to be reduced by max, got a mean"):
        Metric("x", Mean(1.0, 2.0), Reduction.MAX)


def test_mean_is_weighted_by_what_is_behind_each_value():
    # 10 tokens at 1.0 and 30 tokens at 3.0: (10 + 90) / 40
    records = [Metric("actor/entropy", Mean(10.0, 10)), Metric("actor/entropy", Mean(90.0, 30))]
    assert reduce_metrics(records) == {"actor/entropy": 2.5}


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [(Reduction.SUM, 4.0), (Reduction.MIN, -1.0), (Reduction.MAX, 3.0), (Reduction.LAST, 2.0)],
)
def test_other_reductions(reduction, expected):
    records = [Metric("x", value, reduction) for value in (3.0, -1.0, 2.0)]
    assert reduce_metrics(records) == {"x": expected}


def test_a_mean_of_nothing_is_absent_and_empty_parts_do_not_count():
    records = [
        Metric("empty", Mean(math.nan, 0)),
        Metric("part", Mean(math.nan, 0)),
        Metric("part", Mean(6.0, 3)),
    ]
    assert reduce_metrics(records) == {"part": 2.0}


def test_two_reductions_for_one_name_are_refused():
    with pytest.raises(ValueError, match="metric 'x' must have one reduction, got mean and sum"):
        reduce_metrics([Metric("x", 1.0), Metric("x", 1.0, Reduction.SUM)])


@pytest.mark.parametrize("reduction", [Reduction.MEAN, Reduction.SUM, Reduction.MIN, Reduction.MAX])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_nan_is_never_hidden_by_the_order(reduction, order):
    values = (1.0, math.nan, 2.0)
    assert math.isnan(reduce_metrics([Metric("x", values[i], reduction) for i in order])["x"])


def test_infinities_of_both_signs_do_not_raise():
    assert math.isnan(reduce_metrics([Metric("x", math.inf), Metric("x", -math.inf)])["x"])


def test_cancellation_costs_nothing():
    values = [1e16, 1.0, -1e16]
    assert reduce_metrics([Metric("x", value, Reduction.SUM) for value in values]) == {"x": 1.0}


parts = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.integers(1, 1000)),
    min_size=1,
    max_size=30,
)


@given(parts, st.randoms(use_true_random=False))
def test_mean_is_exact_in_any_order(pairs, rng: random.Random):
    exact = sum(Fraction(v) * w for v, w in pairs) / sum(w for _, w in pairs)
    shuffled = rng.sample(pairs, len(pairs))
    scale = max(abs(v) for v, _ in pairs)
    for order in (pairs, shuffled):
        mean = reduce_metrics(Metric("x", Mean(v * w, w)) for v, w in order)["x"]
        assert abs(Fraction(mean) - exact) <= Fraction(1e-12) * Fraction(scale or 1.0)
