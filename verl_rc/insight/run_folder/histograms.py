"""``histograms.jsonl`` into a heat map of log-ratios that a page can show, also for many steps."""

import math
from collections.abc import Container, Iterable

import numpy as np

from verl_rc.insight.run_folder.lines import Record
from verl_rc.insight.run_folder.records import LARGEST_STEP, HeatMap
from verl_rc.records.token_records.token_record import Array

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


def read_heat_map(
    records: Iterable[tuple[int, Record]], notes: list[str], span: Container[int] = range(LARGEST_STEP + 1)
) -> HeatMap | None:
    """Merge the histograms of the steps ``span`` into at most ``MOST_COLUMNS`` columns. None without
    histograms.

    Each histogram has edges of its own, or those of the last one that had some. Where the run went back to an
    earlier step, the histograms from that step on count once: those of its later life.
    """
    by_step: dict[int, Array] = {}
    edges, rows, damaged = None, np.zeros(0, int), 0
    for step, record in records:
        if record.get("name") != LOG_RATIO:
            continue
        while by_step and step <= next(reversed(by_step)):
            by_step.popitem()
        try:
            if "edges" in record and record["edges"] != edges:
                edges = record["edges"]
                rows = _rows_of_bins(np.array(edges, "float64"))
            counts = _counts(record, rows)
        except (KeyError, TypeError, ValueError, IndexError):
            damaged += 1
        else:
            if step in span:
                by_step[step] = counts
    if damaged:
        notes.append(f"histograms.jsonl: {damaged} histogram(s) are damaged and left out.")
    if not by_step:
        return None
    firsts = range(0, len(by_step), math.ceil(len(by_step) / MOST_COLUMNS))
    counts = np.add.reduceat(list(by_step.values()), firsts)
    return HeatMap(list(by_step)[:: firsts.step], EDGES, counts.tolist())


def _rows_of_bins(edges: Array) -> Array:
    """int64 ``[bins]``: the row that the middle of each bin lies in."""
    rows: Array = np.searchsorted(EDGES, (edges[:-1] + edges[1:]) / 2, side="right") - 1
    return rows.clip(0, _ROWS - 1)


def _counts(record: Record, rows: Array) -> Array:
    """float64 ``[rows]``: tokens of each row, from pairs (bin, tokens) of the bins that hold any."""
    bins, counts = np.array(record["bins"], "float64").reshape(-1, 2).T
    if not ((bins >= 0) & (counts >= 0) & np.isfinite(counts)).all():
        raise ValueError("a count must be a number of tokens of a bin")
    return np.bincount(rows[bins.astype("int64")], counts, _ROWS)
