"""Noticing that rewards collapse: the mean score falls well below the best it has been."""

import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

_STANDARD_ERRORS = 4.0
"""A fall within so many standard errors of the mean may be chance."""


@dataclass(frozen=True)
class _StepScores:
    count: int
    total: float
    squares: float


class RewardWatch:
    """Compares the mean score of the last steps with the best such mean so far."""

    def __init__(self, window: int, drop: float | None) -> None:
        """``window`` steps are averaged; a fall by more than the share ``drop`` of the best mean is a collapse (None: never)."""
        self._recent: deque[_StepScores] = deque(maxlen=window)
        self._drop = drop
        self._best = -math.inf

    def state(self) -> dict[str, Any]:
        """What was seen so far, as JSON data; belongs in a checkpoint."""
        return {"recent": [asdict(step) for step in self._recent], "best": self._best if math.isfinite(self._best) else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a ``state``; of more steps than the window holds now, the last ones count."""
        self._recent.clear()
        self._recent.extend(_StepScores(**step) for step in state["recent"])
        self._best = -math.inf if state["best"] is None else state["best"]

    def observe(self, scores: Tensor) -> str | None:
        """Take the scores ``[B]`` of a step in; says what has happened when they have collapsed."""
        values = scores.double()
        self._recent.append(_StepScores(values.numel(), float(values.sum()), float(values.square().sum())))
        if self._drop is None or len(self._recent) < (self._recent.maxlen or 1):
            return None
        count = sum(step.count for step in self._recent)
        mean = sum(step.total for step in self._recent) / count
        variance = max(0.0, sum(step.squares for step in self._recent) / count - mean**2)
        self._best = max(self._best, mean)
        fall = self._best - mean
        if fall <= self._drop * abs(self._best) or fall <= _STANDARD_ERRORS * math.sqrt(variance / count):
            return None
        return (
            f"the mean score of the last {len(self._recent)} steps is {mean:.3g}, down from {self._best:.3g}: more than "
            f"trainer.alerts.reward_drop={self._drop:g} of it is lost"
        )
