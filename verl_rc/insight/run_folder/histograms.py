"""``histograms.jsonl`` into a heat map of log-ratios that a page can show, also for many steps."""

import math
from bisect import bisect_right
from collections.abc import Container, Iterable, Sequence
from itertools import pairwise

from verl_rc.insight.run_folder.lines import Record
from verl_rc.insight.run_folder.records import LARGEST_STEP, HeatMap

LOG_RATIO = "rollout_corr/log_ratio"
MOST_COLUMNS = 400
_ROWS_PER_SIDE = 47
_NEAREST, _FARTHEST = 1e-4, 20.0
"""Nats. Rows are the same for every run, so that pictures compare; what is nearer to 0 than the first is in
the middle row."""

_SIDE = tuple(
    _NEAREST * (_FARTHEST / _NEAREST) ** (row / _ROWS_PER_SIDE) for row in range(_ROWS_PER_SIDE + 1)
)
EDGES = (*(-edge for edge in reversed(_SIDE)), *_SIDE)
"""Edges of the rows, ascending, nats."""
_ROWS = len(EDGES) - 1


class _HeatMapBuilder:
    """Columns of equal numbers of steps; two become one whenever there are too many."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.counts: list[list[float]] = []
        self._width, self._filled = 1, 0

    def add(self, step: int, counts: Sequence[float]) -> None:
        while self.steps and step <= self.steps[-1]:  # a later life of the run wins
            self.steps.pop()
            self.counts.pop()
            self._filled = 0
        if self.counts and 0 < self._filled < self._width:
            self.counts[-1] = [a + b for a, b in zip(self.counts[-1], counts, strict=True)]
            self._filled += 1
        else:
            self.steps.append(step)
            self.counts.append(list(counts))
            self._filled = 1
        if len(self.steps) > MOST_COLUMNS:
            self._halve()

    def _halve(self) -> None:
        pairs = [self.counts[i : i + 2] for i in range(0, len(self.counts), 2)]
        self._filled += self._width if len(pairs[-1]) == 2 else 0
        self.counts = [[math.fsum(cells) for cells in zip(*pair, strict=True)] for pair in pairs]
        self.steps = self.steps[::2]
        self._width *= 2


def read_heat_map(
    records: Iterable[tuple[int, Record]], notes: list[str], span: Container[int] = range(LARGEST_STEP + 1)
) -> HeatMap | None:
    """Merge the histograms of the steps ``span``; None without any. Each has edges of its own, or those of
    the last one that had some."""
    builder, edges, rows, damaged = _HeatMapBuilder(), None, [], 0
    for step, record in records:
        if record.get("name") != LOG_RATIO:
            continue
        try:
            if "edges" in record and record["edges"] != edges:
                edges = record["edges"]
                rows = [_row_of((float(low) + float(high)) / 2) for low, high in pairwise(edges)]
            if step in span:
                builder.add(step, _merged(record, rows))
        except (KeyError, TypeError, ValueError, IndexError):
            damaged += 1
    if damaged:
        notes.append(f"histograms.jsonl: {damaged} histogram(s) are damaged and left out.")
    return HeatMap(builder.steps, EDGES, builder.counts) if builder.steps else None


def _row_of(value: float) -> int:
    return min(max(bisect_right(EDGES, value) - 1, 0), _ROWS - 1)


def _merged(record: Record, rows: Sequence[int]) -> list[float]:
    """Counts of the rows, from pairs (bin, count) of the bins that hold any, or from one count a bin as runs
    once wrote."""
    pairs = record["bins"] if "bins" in record else list(enumerate(record["counts"]))
    if "bins" not in record and len(pairs) != len(rows):
        raise ValueError("a histogram must have one count a bin")
    merged = [0.0] * _ROWS
    for index, count in pairs:
        if not (index >= 0 and 0 <= float(count) < math.inf):
            raise ValueError("a count must be a number of tokens of a bin")
        merged[rows[index]] += float(count)
    return merged
