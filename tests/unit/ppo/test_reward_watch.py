"""A collapse is a fall of the moving mean that is large and no chance."""

import torch

from verl_rc.ppo.reward_watch import RewardHistory


def scores(mean: float, count: int = 64) -> torch.Tensor:
    """0s and 1s with this mean."""
    ones = round(mean * count)
    return torch.tensor([1.0] * ones + [0.0] * (count - ones))


class Watch:
    """A history that moves on with every step."""

    def __init__(self, window: int, drop: float | None) -> None:
        self.window, self.drop, self.history = window, drop, RewardHistory()

    def observe(self, scores: torch.Tensor) -> str | None:
        self.history = self.history.observed(scores, self.window)
        return self.history.collapse(self.window, self.drop)


def test_a_lasting_fall_below_half_of_the_best_is_a_collapse() -> None:
    watch = Watch(window=2, drop=0.5)
    assert [watch.observe(scores(mean)) for mean in (0.25, 0.75, 0.75, 0.5, 0.375)] == [None] * 5
    complaint = watch.observe(scores(0.0625))
    assert complaint is not None
    assert "of the last 2 steps is 0.219, down from 0.75" in complaint
    assert "trainer.alerts.reward_drop=0.5" in complaint


def test_nothing_is_said_before_the_window_is_full() -> None:
    watch = Watch(window=3, drop=0.5)
    assert [watch.observe(scores(mean)) for mean in (1.0, 0.0)] == [None, None]
    assert watch.observe(scores(0.0)) is None  # the first mean is the best so far


def test_a_fall_within_chance_is_none() -> None:
    """A quarter of 16 samples against none of 16: the fall .125 is within 4 standard errors, 4 * sqrt(.1094 / 32) = .23."""
    watch = Watch(window=2, drop=0.1)
    assert [watch.observe(scores(mean, 16)) for mean in (0.25, 0.25, 0.0)] == [None, None, None]


def test_the_size_of_a_negative_best_counts() -> None:
    watch = Watch(window=1, drop=0.5)
    assert watch.observe(torch.full((8,), -1.0)) is None
    assert watch.observe(torch.full((8,), -1.4)) is None
    assert watch.observe(torch.full((8,), -1.6)) is not None


def test_null_never_complains() -> None:
    watch = Watch(window=1, drop=None)
    assert [watch.observe(scores(mean)) for mean in (1.0, 0.0)] == [None, None]


def test_a_shorter_window_counts_the_last_steps_and_a_longer_one_waits_until_it_is_full() -> None:
    history = RewardHistory()
    for mean in (1.0, 1.0, 0.75):
        history = history.observed(scores(mean), window=3)
    assert history.observed(scores(0.0), window=1).collapse(1, 0.5) is not None
    assert history.observed(scores(0.0), window=5).collapse(5, 0.5) is None
