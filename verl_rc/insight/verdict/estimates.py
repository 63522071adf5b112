"""Numbers that verdicts rest on: means with intervals, trends, straight lines, confirmed conditions. Pure;
the same series gives the same numbers."""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl_rc.insight.run_folder import RunData, Series

CONFIDENCE = 0.9
_MOST_BLOCKS = 20
_DRAWS = 400
_FEWEST_FOR_INTERVAL = 4
FEWEST_FOR_TREND = 12
"""Steps below which no trend is stated: each end must have enough for an interval."""
LINEAR = 0.8
"""r² above which a relation is called linear."""


@dataclass(frozen=True)
class MeanEstimate:
    """A mean over some steps, with the 90 % interval of a block bootstrap; None where there are too few
    values for one."""

    value: float
    interval: tuple[float, float] | None
    steps: tuple[int, int]
    count: int

    @property
    def error(self) -> float:
        """Half the interval; 0 without one."""
        return 0.0 if self.interval is None else (self.interval[1] - self.interval[0]) / 2


def mean_of(series: Series) -> MeanEstimate | None:
    """The mean of a series of finite values. None for an empty one."""
    if not len(series):
        return None
    value = math.fsum(series.values) / len(series)
    return MeanEstimate(
        value, bootstrap_interval(series.values), (series.steps[0], series.steps[-1]), len(series)
    )


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The 90 % interval of the mean from drawing blocks of neighbouring values, which may depend on each
    other."""
    if len(values) < _FEWEST_FOR_INTERVAL:
        return None
    blocks = min(_MOST_BLOCKS, max(_FEWEST_FOR_INTERVAL, len(values) // 2))
    bounds = [len(values) * i // blocks for i in range(blocks + 1)]
    sums = [math.fsum(values[a:b]) for a, b in pairwise(bounds)]
    sizes = [b - a for a, b in pairwise(bounds)]
    generator = random.Random(len(values))  # the same run gives the same page
    means = []
    for _ in range(_DRAWS):
        block_numbers = generator.choices(range(blocks), k=blocks)
        means.append(sum(sums[i] for i in block_numbers) / sum(sizes[i] for i in block_numbers))
    means.sort()
    tail = round(_DRAWS * (1 - CONFIDENCE) / 2)
    return means[tail], means[-1 - tail]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of each value and up to ``width - 1`` values before it."""
    means, total = [], 0
    for i, value in enumerate(values):
        total += _in_units(value) - (_in_units(values[i - width]) if i >= width else 0)
        means.append(total / (min(i + 1, width) * _UNITS))
    return means


_UNITS = 1 << 1074
"""Number of smallest floats in 1. Sums in this unit are whole numbers: what is added and taken away leaves no
error."""


def _in_units(value: float) -> int:
    numerator, denominator = value.as_integer_ratio()
    return numerator * (_UNITS // denominator)


def first_tenth(series: Series) -> Series:
    """The first tenth of a series, at least four steps; a third of a short one, at least one step."""
    size = _tenth_size(len(series))
    return Series(series.steps[:size], series.values[:size])


def last_tenth(series: Series) -> Series:
    """The last tenth of a series, at least four steps; a third of a short one, at least one step."""
    start = len(series) - _tenth_size(len(series))
    return Series(series.steps[start:], series.values[start:])


def last_mean(run: RunData, name: str) -> MeanEstimate | None:
    """The mean of the last tenth of a metric; None where it was not logged."""
    return mean_of(last_tenth(run.get(name)))


def _tenth_size(length: int) -> int:
    if length < FEWEST_FOR_TREND:
        return min(length, max(1, length // 3))
    return max(_FEWEST_FOR_INTERVAL, math.ceil(length * 0.1))


@dataclass(frozen=True)
class Change:
    """First tenth against last tenth."""

    first: MeanEstimate
    last: MeanEstimate

    @property
    def difference(self) -> float:
        """Last less first."""
        return self.last.value - self.first.value

    @property
    def error(self) -> float:
        """Half the 90 % interval of the difference."""
        return math.hypot(self.first.error, self.last.error)

    @property
    def is_clear(self) -> bool:
        """Whether the interval of the difference leaves 0."""
        return abs(self.difference) > self.error


def change_of(series: Series) -> Change | None:
    """The change over a series; None where it is too short to tell one."""
    if len(series) < FEWEST_FOR_TREND:
        return None
    first, last = mean_of(first_tenth(series)), mean_of(last_tenth(series))
    return None if first is None or last is None else Change(first, last)


@dataclass(frozen=True)
class FittedLine:
    """A straight line fitted by least squares."""

    slope: float
    intercept: float
    r_squared: float


def fit_line(x: Sequence[float], y: Sequence[float]) -> FittedLine | None:
    """The line through points; None for fewer than three, or where x or y does not vary."""
    if len(x) < 3:
        return None
    try:
        return FittedLine(*statistics.linear_regression(x, y), statistics.correlation(x, y) ** 2)
    except statistics.StatisticsError:
        return None


def mapped(series: Series, function: Callable[[float], float]) -> Series:
    """The series with ``function`` of each value."""
    return Series(series.steps, [function(value) for value in series.values])


@dataclass(frozen=True)
class Confirmation:
    """A condition that holds at two neighbouring steps of a series."""

    steps: tuple[int, int]
    """The first step of the first such pair, and the last step of the last one."""
    count: int
    """Steps of the series at which the condition holds, neighbours or not."""


def confirm(series: Series, condition: Callable[[float], bool]) -> Confirmation | None:
    """The steps where a condition on values holds at two recorded steps in a row. None if there are none.

    One step proves nothing: in a long run, a heavy tail alone reaches any bound once.
    """
    holds = [condition(value) for value in series.values]
    pairs = [i for i, pair in enumerate(pairwise(holds)) if all(pair)]
    if not pairs:
        return None
    return Confirmation((series.steps[pairs[0]], series.steps[pairs[-1] + 1]), sum(holds))
