"""Scores of methods: areas by hand, intervals by their limits, and who is told apart from whom."""

import math

import numpy as np
import pytest

from verl_rc.study.runs import Run
from verl_rc.study.standing import Score, Standing, area, scores
from verl_rc.study.study import ACCURACY
from verl_rc.study.tracks import CONTROL, Track

TRACK = Track((), {"easy": (), "hard": ()}, (), 1.0)


def run(arm: str, seed: int, *accuracies: float, seconds: float = 1.0) -> Run:
    curves = {
        ACCURACY: [(10 * place, value) for place, value in enumerate(accuracies)],
        "timing_s/step": [(1, seconds)],
    }
    overrides = ["trainer.total_training_steps=20"]
    return Run(arm, seed, overrides, 0, 60.0, curves, machine="mine", versions="torch 2")


def from_one_model(arm: str, seed: int, mean: float, seconds: float = 1.0) -> Run:
    """A run that begins at 0.4, whose mean accuracy over the steps is ``mean``."""
    later = (4 * mean - 0.4) / 3
    return run(arm, seed, 0.4, later, later, seconds=seconds)


def score(*shares: list[float], name: str = "m") -> Score:
    values = np.array(shares)
    return Score(
        name, ["easy", "hard"][: values.shape[1]], values, np.zeros_like(values), 1.0, [("mine", "")]
    )


def test_an_area_is_a_mean_over_steps_and_what_was_not_reached_counts_as_0() -> None:
    mean, deviation = area(run("a", 1, 0.2, 0.4, 0.8))
    assert mean == pytest.approx((0.3 * 10 + 0.6 * 10) / 20)
    roots = [math.sqrt(share * (1 - share) / 256) for share in (0.2, 0.4, 0.8)]
    assert deviation == pytest.approx((roots[0] + 2 * roots[1] + roots[2]) / 4)
    assert area(run("a", 1, 0.2, 0.4))[0] == pytest.approx(0.15)
    assert area(run("a", 1)) == (0.0, 0.0)


def test_a_score_is_relative_to_the_control_of_all_seeds() -> None:
    runs = [from_one_model(CONTROL, seed, mean) for seed, mean in ((1, 0.4), (2, 0.5), (3, 0.6))]
    runs += [from_one_model("easy m", seed, 0.5, seconds=seed) for seed in (1, 2, 3)]
    runs += [from_one_model("hard m", seed, 0.1 * seed, seconds=9) for seed in (1, 2, 3)]
    by_key = {(run.arm, run.seed): run for run in runs}
    (found,) = scores(TRACK, ["m", "unfinished"], by_key)
    assert found.by_condition == pytest.approx({"easy": 1.0, "hard": 0.4})
    assert (found.mean, found.worst, found.seconds) == (pytest.approx(0.7), "hard", 2)
    assert found.made_on == [("mine", "torch 2")]
    assert list(scores(TRACK, ["m"], {key: run for key, run in by_key.items() if key != (CONTROL, 2)})) == []
    del by_key["hard m", 3]
    assert list(scores(TRACK, ["m"], by_key)) == []


def test_the_interval_covers_seeds_and_prompts() -> None:
    """Seeds: all draws of one of three have chance 1/27 < 5 %, two of three 7/27. Prompts: the normal's."""
    low, high = score([0.0], [0.0], [0.9]).interval
    assert (low, high) == (pytest.approx(0.0), pytest.approx(0.6))
    noisy = Score("m", ["easy"], np.full((3, 1), 0.5), np.full((3, 1), 0.1), 1.0, [])
    half = 1.645 * 0.1 / math.sqrt(3)
    assert noisy.interval == pytest.approx((0.5 - half, 0.5 + half), abs=0.005)


def test_methods_are_compared_in_pairs() -> None:
    """Seeds differ by far more than the methods do: only pairs tell them apart."""
    lower, higher = score([0.1], [0.5], [0.9], name="lower"), score([0.12], [0.53], [0.91], name="higher")
    crossing = score([0.2], [0.4], [0.9], name="crossing")
    assert higher.is_better_than(lower)
    assert not lower.is_better_than(higher)
    assert not crossing.is_better_than(lower)
    assert not lower.is_better_than(crossing)
    lines = Standing("short", higher, [lower, crossing]).lines()
    assert "easy        0.520  (0.120, 0.530, 0.910)" in lines
    assert lines[-2:] == ["better than: lower", "not separable from: crossing"]
    assert Standing("short", lower, [higher]).as_json()["worse than"] == ["higher"]
