"""Metric records."""

import math

import pytest

from verl_rc.metrics import Metric, Reduction


def test_defaults_to_a_mean_of_weight_one():
    assert Metric("actor/entropy", 0.84) == Metric("actor/entropy", 0.84, Reduction.MEAN, 1.0)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_refuses_weights_that_no_mean_can_use(weight):
    with pytest.raises(ValueError, match=r"weight of metric 'actor/entropy' must be finite and at least 0"):
        Metric("actor/entropy", 0.84, weight=weight)


def test_is_frozen():
    with pytest.raises(AttributeError):
        Metric("actor/entropy", 0.84).value = 1.0
