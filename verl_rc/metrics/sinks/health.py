"""Metrics that stay outside their healthy range: said when it is certain, and not at every step again."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from verl_rc.metrics.catalog import CATALOG, MetricSpec
from verl_rc.metrics.catalog.spec import Bounds

WATCHED_PREFIX = "rollout_corr/"
ALERT_TITLE = "rollout correction is not healthy"
_NEVER = (0, 0)


@dataclass(frozen=True)
class Complaint:
    """A metric outside its healthy range."""

    name: str
    value: float
    spec: MetricSpec
    steps: int
    """Steps in a row that it has been outside."""

    def __str__(self) -> str:
        """One line: the number, what would be healthy, how long, and what it measures."""
        times = "this step" if self.steps == 1 else f"{self.steps} steps in a row"
        return f"{self.name} = {self.value:.3g}, healthy is {self.spec.healthy_in_words} ({times}): {self.spec.formula}"


class HealthMonitor:
    """Compares the metrics of every step with the healthy ranges of the catalogue.

    A metric is complained about once it was outside for ``patience`` steps in a row (at once where 0 alone is healthy), and not
    again within ``quiet_steps`` steps. Only names below ``WATCHED_PREFIX`` are looked at.
    """

    def __init__(self, patience: int = 3, quiet_steps: int = 50) -> None:
        """Raises ``ValueError`` when a number of steps is below 1."""
        if min(patience, quiet_steps) < 1:
            raise ValueError(f"patience and quiet_steps must be at least 1 step, got {patience} and {quiet_steps}.")
        self._patience = patience
        self._quiet_steps = quiet_steps
        self._steps_outside: dict[str, int] = {}
        self._last_said: dict[str, int] = {}

    def observe(self, metrics: Mapping[str, float], step: int) -> list[Complaint]:
        """What has to be said about this step; a metric that is missing keeps its count."""
        return list(self._complaints(metrics, step))

    def _complaints(self, metrics: Mapping[str, float], step: int) -> Iterator[Complaint]:
        for name, value in metrics.items():
            spec = CATALOG.find(name) if name.startswith(WATCHED_PREFIX) else None
            if spec is None or spec.healthy is None:
                continue
            if _is_inside(value, spec.healthy):
                self._steps_outside.pop(name, None)
                continue
            steps = self._steps_outside[name] = self._steps_outside.get(name, 0) + 1
            is_certain = steps >= (1 if spec.healthy == _NEVER else self._patience)
            is_quiet = name in self._last_said and step - self._last_said[name] < self._quiet_steps
            if is_certain and not is_quiet:
                self._last_said[name] = step
                yield Complaint(name, value, spec, steps)


def _is_inside(value: float, healthy: Bounds) -> bool:
    """False for NaN, which is healthy nowhere."""
    low, high = healthy
    return (low is None or value >= low) and (high is None or value <= high)
