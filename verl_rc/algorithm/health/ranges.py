"""Warnings about metrics that stay outside their healthy range, repeated only after a number of quiet
steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from verl_rc.metrics.catalog import CATALOG, MetricSpec

WATCHED_PREFIX = "rollout_corr/"
ALERT_TITLE = "rollout correction is not healthy"
_ONLY_ZERO = (0, 0)


@dataclass(frozen=True)
class HealthWarning:
    """A metric outside its healthy range."""

    name: str
    value: float
    spec: MetricSpec
    steps: int
    """Consecutive steps outside the healthy range."""

    def __str__(self) -> str:
        """One line: the value, the healthy range, the number of steps and the formula."""
        times = "this step" if self.steps == 1 else f"{self.steps} steps in a row"
        return (
            f"{self.name} = {self.value:.3g}, healthy is {self.spec.healthy_in_words} ({times}): "
            f"{self.spec.formula}"
        )


@dataclass(frozen=True)
class CauseEpisode:
    """Steps in which the metrics named one cause of a gap."""

    first: int
    last: int
    is_told: bool = False
    """Whether an alert was sent about it."""


@dataclass(frozen=True)
class CauseHistory:
    """The history from which the next step's causes are named; stored in checkpoints."""

    episodes: dict[str, CauseEpisode] = field(default_factory=dict)
    """Episodes that may go on, by cause."""
    first_noise: tuple[float, ...] = ()
    """``rollout_corr/logit_noise`` of the first steps, at most two."""


@dataclass(frozen=True)
class HealthHistory:
    """The metrics outside their healthy range so far; stored in checkpoints."""

    steps_outside: dict[str, int] = field(default_factory=dict)
    """Consecutive steps outside the healthy range, by metric that is outside now."""
    last_said: dict[str, int] = field(default_factory=dict)
    """The step of the last warning, by metric."""
    causes: CauseHistory = field(default_factory=CauseHistory)


def range_warnings(
    metrics: Mapping[str, float], step: int, history: HealthHistory, patience: int = 3, quiet_steps: int = 50
) -> tuple[list[HealthWarning], HealthHistory]:
    """Compare a step's metrics with the healthy ranges of the catalogue; returns warnings and the updated
    history.

    A warning is issued after ``patience`` consecutive steps outside the range (at once when only 0 is
    healthy), and not again within ``quiet_steps`` steps. Only names below ``WATCHED_PREFIX`` are checked; a
    missing metric keeps its count.
    """
    warnings, steps_outside, last_said = [], dict(history.steps_outside), dict(history.last_said)
    for name, value in metrics.items():
        spec = CATALOG.find(name) if name.startswith(WATCHED_PREFIX) else None
        if spec is None or spec.healthy is None:
            continue
        low, high = spec.healthy
        if (low is None or value >= low) and (high is None or value <= high):  # not NaN
            steps_outside.pop(name, None)
            continue
        steps = steps_outside[name] = steps_outside.get(name, 0) + 1
        is_certain = steps >= (1 if spec.healthy == _ONLY_ZERO else patience)
        is_quiet = name in last_said and step - last_said[name] < quiet_steps
        if is_certain and not is_quiet:
            last_said[name] = step
            warnings.append(HealthWarning(name, value, spec, steps))
    return warnings, HealthHistory(steps_outside, last_said, history.causes)
