"""Noticing that rewards collapse: the mean score falls well below the best it has been."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_STANDARD_ERRORS = 4.0
"""A fall within so many standard errors of the mean may be chance."""


@dataclass(frozen=True)
class StepScores:
    """The scores of one step, summed up."""

    count: int
    total: float
    squares: float


@dataclass(frozen=True)
class RewardHistory:
    """The scores of the last steps, and the best mean that so many steps had. A value: ``observed`` returns the next one."""

    recent: tuple[StepScores, ...] = ()
    """Oldest first; at most a window of them."""
    best: float | None = None
    """None: no window was full yet."""

    def observed(self, scores: Tensor, window: int) -> "RewardHistory":
        """With the scores ``[B]`` of another step; the last ``window`` steps are kept (``trainer.alerts.reward_window``)."""
        values = scores.double()
        total, squares = torch.stack([values.sum(), values.square().sum()]).tolist()
        recent = (*self.recent, StepScores(values.numel(), total, squares))[-window:]
        if len(recent) < window:
            return RewardHistory(recent, self.best)
        mean = _mean_and_variance(recent)[0]
        return RewardHistory(recent, mean if self.best is None else max(self.best, mean))

    def collapse(self, window: int, drop: float | None) -> str | None:
        """What has happened when the mean of the last ``window`` steps is below the best one by more than the share ``drop``
        of it (``trainer.alerts.reward_drop``); None when it is not, or ``drop`` is None."""
        if drop is None or self.best is None or len(self.recent) < window:
            return None
        mean, variance = _mean_and_variance(self.recent)
        count, fall = sum(step.count for step in self.recent), self.best - mean
        if fall <= drop * abs(self.best) or fall <= _STANDARD_ERRORS * math.sqrt(variance / count):
            return None
        return (
            f"the mean score of the last {len(self.recent)} steps is {mean:.3g}, down from {self.best:.3g}: more than "
            f"trainer.alerts.reward_drop={drop:g} of it is lost"
        )


def _mean_and_variance(steps: tuple[StepScores, ...]) -> tuple[float, float]:
    count = sum(step.count for step in steps)
    mean = sum(step.total for step in steps) / count
    return mean, max(0.0, sum(step.squares for step in steps) / count - mean**2)
