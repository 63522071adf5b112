"""Updates that are skipped or not finite are counted across steps; rewards that collapse are noticed."""

import math

import pytest
import torch

from verl_rc.algorithm.health.run_limits import (
    NonFiniteGradientsError,
    RewardHistory,
    TooManySkippedUpdatesError,
    count_nonfinite_updates,
    count_skipped_updates,
)
from verl_rc.records.optimizer_step import OptimizerStep

EMPTY, FULL = 0, 5
"""Kept tokens of a mini-batch."""


def test_an_update_in_between_starts_the_count_again() -> None:
    in_a_row = 0
    for step, expected in (([EMPTY, EMPTY, FULL], 0), ([EMPTY, EMPTY], 2), ([FULL], 0), ([EMPTY, EMPTY], 2)):
        in_a_row = count_skipped_updates(in_a_row, step, limit=3)
        assert in_a_row == expected


def test_the_limit_holds_across_steps_and_at_once() -> None:
    in_a_row = count_skipped_updates(0, [FULL, EMPTY, EMPTY], limit=3)
    with pytest.raises(TooManySkippedUpdatesError, match="every token of 3 in a row"):
        count_skipped_updates(in_a_row, [EMPTY, FULL], limit=3)


def steps(*grad_norms: float) -> list[OptimizerStep]:
    return [OptimizerStep(norm) for norm in grad_norms]


def test_a_finite_gradient_in_between_starts_the_count_again() -> None:
    in_a_row = 0
    for norms, expected in (([math.nan, 1.0], 0), ([math.inf], 1), ([0.0, math.nan], 1)):
        in_a_row = count_nonfinite_updates(in_a_row, "actor", steps(*norms), limit=2)
        assert in_a_row == expected


def test_the_limit_holds_across_steps_and_the_role_is_named() -> None:
    in_a_row = count_nonfinite_updates(0, "critic", steps(1.0, math.nan), limit=2)
    with pytest.raises(
        NonFiniteGradientsError, match="the critic's gradients must be finite, but those of 2"
    ):
        count_nonfinite_updates(in_a_row, "critic", steps(-math.inf, 1.0), limit=2)


def scores(mean: float, count: int = 64) -> torch.Tensor:
    """0s and 1s with this mean."""
    ones = round(mean * count)
    return torch.tensor([1.0] * ones + [0.0] * (count - ones))


class Watch:
    """A history that moves on with every step."""

    def __init__(self, window: int, drop: float) -> None:
        self.window, self.drop, self.history = window, drop, RewardHistory()

    def observe(self, scores: torch.Tensor) -> str | None:
        self.history = self.history.with_scores(scores, self.window)
        return self.history.collapse(self.window, self.drop)


def test_a_lasting_fall_below_half_of_the_best_is_a_collapse() -> None:
    watch = Watch(window=2, drop=0.5)
    assert [watch.observe(scores(mean)) for mean in (0.25, 0.75, 0.75, 0.5, 0.375)] == [None] * 5
    complaint = watch.observe(scores(0.0625))
    assert complaint is not None
    assert "of the last 2 steps is 0.219, down from 0.75" in complaint
    assert "more than 50% of it is lost" in complaint


def test_nothing_is_said_before_the_window_is_full() -> None:
    watch = Watch(window=3, drop=0.5)
    assert [watch.observe(scores(mean)) for mean in (1.0, 0.0)] == [None, None]
    assert watch.observe(scores(0.0)) is None  # the first mean is the best so far


def test_a_fall_within_chance_is_none() -> None:
    """A quarter of 16 samples against none of 16: the fall .125 is within 4 standard errors, 4 * sqrt(.1094 /
    32) = .23."""
    watch = Watch(window=2, drop=0.1)
    assert [watch.observe(scores(mean, 16)) for mean in (0.25, 0.25, 0.0)] == [None, None, None]


def test_the_size_of_a_negative_best_counts() -> None:
    watch = Watch(window=1, drop=0.5)
    assert watch.observe(torch.full((8,), -1.0)) is None
    assert watch.observe(torch.full((8,), -1.4)) is None
    assert watch.observe(torch.full((8,), -1.6)) is not None


def test_a_shorter_window_counts_the_last_steps_and_a_longer_one_waits_until_it_is_full() -> None:
    history = RewardHistory()
    for mean in (1.0, 1.0, 0.75):
        history = history.with_scores(scores(mean), window=3)
    assert history.with_scores(scores(0.0), window=1).collapse(1, 0.5) is not None
    assert history.with_scores(scores(0.0), window=5).collapse(5, 0.5) is None
