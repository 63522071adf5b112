"""The heat map keeps every count, whatever the number of steps and however the file writes them."""

import math
from itertools import pairwise

import pytest

from verl_rc.insight.run_folder.histograms import EDGES, LOG_RATIO, MOST_COLUMNS, read_heat_map
from verl_rc.metrics.log_ratio_bins import HISTOGRAM_EDGES


def record(step, values):
    """One histogram with a count of 1 in the bin of each value."""
    counts = [0.0] * (len(HISTOGRAM_EDGES) - 1)
    for value in values:
        counts[
            next(i for i in range(len(counts)) if HISTOGRAM_EDGES[i] <= value < HISTOGRAM_EDGES[i + 1])
        ] += 1
    bins = [[index, count] for index, count in enumerate(counts) if count]
    return step, {"step": step, "name": LOG_RATIO, "edges": list(HISTOGRAM_EDGES), "bins": bins}


def row_of(value):
    return next(row for row in range(len(EDGES) - 1) if EDGES[row] <= value < EDGES[row + 1])


def test_counts_lie_in_the_rows_of_their_values():
    values = [-3.0, -0.02, 0.0, 0.00201, 0.5]
    heat = read_heat_map([record(1, values), record(2, [0.5, 0.5])], [])
    assert heat is not None
    assert heat.steps == [1, 2]
    for value in values:
        near = range(row_of(value) - 1, row_of(value) + 2)  # a bin's middle may lie in the next row
        assert sum(heat.counts[0][row] for row in near) >= 1
    assert sum(heat.counts[0]) == 5
    assert sum(heat.counts[1]) == 2
    assert heat.counts[0][len(EDGES) // 2 - 1] == 1  # 0 has the row in the middle
    assert len(EDGES) == 96


@pytest.mark.parametrize("steps", [1, MOST_COLUMNS, MOST_COLUMNS + 1, 2 * MOST_COLUMNS + 1])
def test_any_number_of_steps_fits_and_loses_no_count(steps):
    heat = read_heat_map((record(step, [0.5] * (1 + step % 3)) for step in range(1, steps + 1)), [])
    assert heat is not None
    assert len(heat.steps) <= MOST_COLUMNS
    assert heat.steps[0] == 1
    assert len({b - a for a, b in pairwise(heat.steps)}) <= 1  # columns are of one width
    assert math.fsum(map(math.fsum, heat.counts)) == sum(1 + step % 3 for step in range(1, steps + 1))


def test_edges_hold_until_others_are_written():
    step, first = record(1, [0.5, -0.1])
    further = {"step": 2, "name": LOG_RATIO, "bins": first["bins"]}
    heat, expected = (
        read_heat_map([(step, first), (2, further)], []),
        read_heat_map([record(1, [0.5, -0.1])], []),
    )
    assert heat.counts == [expected.counts[0]] * 2


@pytest.mark.parametrize("steps", [10, 3 * MOST_COLUMNS])
def test_steps_of_an_earlier_life_do_not_count(steps):
    """The later life begins inside a column of several steps, and ends a step earlier."""
    lives = [record(step, [0.5] * 3) for step in range(1, steps + 1)]
    lives += [record(step, [-0.5]) for step in range(steps - 2, steps)]
    heat = read_heat_map(lives, [])
    assert math.fsum(map(math.fsum, heat.counts)) == 3 * (steps - 3) + 2
    assert sum(column[row_of(-0.5)] for column in heat.counts) == 2


DAMAGED = [
    {"edges": "x"},
    *({"bins": bins} for bins in ([[99999, 1.0]], [[0, -1.0]], [[-1, 1.0]], 3, [3])),
]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_damaged_histograms_are_left_out_and_said(damaged):
    step, good = record(1, [0.5])
    notes: list[str] = []
    heat = read_heat_map([(step, good), (2, {**good, **damaged})], notes)
    assert heat is not None
    assert heat.steps == [1]
    assert any("1 histogram(s) are damaged" in note for note in notes)


def test_other_histograms_and_none():
    assert read_heat_map([(1, {"step": 1, "name": "other", "edges": [0, 1], "bins": [[0, 1]]})], []) is None
    assert read_heat_map([], []) is None
