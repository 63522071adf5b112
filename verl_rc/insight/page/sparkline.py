"""Small drawings without scripts, as SVG text: what a chart shows where scripts are off, and in the summary
table."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby

from verl_rc.insight.page.encode import Curve
from verl_rc.insight.run_folder.records import is_usable

_WIDTH, _HEIGHT = 320.0, 80.0
_MOST_LINES = 6
_MOST_POINTS = 160


def sparkline(curves: Sequence[Curve]) -> str:
    """All curves on one scale; gaps stay gaps, and fewer than three points are dots."""
    visible = [curve for curve in curves[:_MOST_LINES] if any(map(is_usable, curve.y))]
    if not visible:
        return ""
    xs = [x for curve in visible for x in curve.x]
    ys = [y for curve in visible for y in curve.y if is_usable(y)]
    first_x, width = min(xs), (max(xs) - min(xs)) or 1.0
    bottom, height = min(ys), (max(ys) - min(ys)) or 1.0
    shapes = []
    for number, curve in enumerate(visible):
        for part in _unbroken(curve):
            points = [
                f"{4 + (x - first_x) / width * (_WIDTH - 8):.1f},{_HEIGHT - 4 - (y - bottom) / height * (_HEIGHT - 8):.1f}"  # noqa: E501
                for x, y in part
            ]
            if len(points) < 3:
                dots = (point.split(",") for point in points)
                shapes += [f'<circle class="c{number}" cx="{x}" cy="{y}" r="2.5"/>' for x, y in dots]
            else:
                shapes.append(f'<polyline class="c{number}" points="{" ".join(points)}"/>')
    return f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-hidden="true">{"".join(shapes)}</svg>'


def _unbroken(curve: Curve) -> Iterator[list[tuple[float, float]]]:
    """Sequences of neighbouring finite points, thinned out."""
    step = max(1, math.ceil(len(curve.x) / _MOST_POINTS))
    points = list(zip(curve.x, curve.y, strict=True))[::step]
    for is_drawn, part in groupby(points, lambda point: is_usable(point[1])):
        if is_drawn:
            yield list(part)
