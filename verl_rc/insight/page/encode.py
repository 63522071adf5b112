"""Numbers on their way into a page: at most so many points a curve, as base64 of little-endian float32."""

import base64
import math
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from verl_rc.insight.run_folder import Series
from verl_rc.insight.run_folder.records import is_usable

MOST_POINTS = 1_000
"""Points of a curve; longer ones become buckets of equal width in steps, with mean, smallest and largest."""


@dataclass(frozen=True)
class Curve:
    """The drawn points of one line."""

    x: list[float]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None


def curve_of(
    line: Series, low: Series | None = None, high: Series | None = None, most_points: int = MOST_POINTS
) -> Curve:
    """A curve of at most ``most_points`` points, with the band between ``low`` and ``high`` where there is
    one.

    Steps without a finite value are gaps. A spike of one step stays visible: the bucket's extremes become the
    band.
    """
    lows = None if low is None else low.by_step()
    highs = None if high is None else high.by_step()
    if len(line) <= most_points:
        return Curve(
            [float(step) for step in line.steps],
            list(line.values),
            None if lows is None else [lows.get(step, math.nan) for step in line.steps],
            None if highs is None else [highs.get(step, math.nan) for step in line.steps],
        )
    first, width = line.steps[0], (line.steps[-1] - line.steps[0] + 1) / most_points
    points = zip(line.steps, line.values, strict=True)
    x, y, smallest, largest = [], [], [], []
    for _, bucket in groupby(points, lambda point: int((point[0] - first) / width)):
        steps, every_value = zip(*bucket, strict=True)
        values = [value for value in every_value if is_usable(value)]
        x.append(float(steps[len(steps) // 2]))
        y.append(math.fsum(values) / len(values) if values else math.nan)
        smallest.append(min(_finite(steps, lows) or values, default=math.nan))
        largest.append(max(_finite(steps, highs) or values, default=math.nan))
    return Curve(x, y, smallest, largest)


def _finite(steps: Iterable[int], by_step: dict[int, float] | None) -> list[float]:
    return (
        []
        if by_step is None
        else [by_step[step] for step in steps if step in by_step and is_usable(by_step[step])]
    )


def packed(values: Iterable[float]) -> str:
    """Base64 of the numbers as float32; beyond its range they become infinite."""
    numbers = array(
        "f",
        (
            value if is_usable(value) or math.isnan(value) else math.copysign(math.inf, value)
            for value in values
        ),
    )
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers.tobytes()).decode("ascii")
