"""Lines of logs: JSON objects, numbers and steps, and notes about the unreadable ones."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median_high
from typing import Any

from verl_rc.data.token_rows import parse_line
from verl_rc.insight.run_folder.records import LARGEST_STEP, Columns, SavedSample

Record = dict[str, Any]


def read_records(path: Path, notes: list[str], max_complaints: int = 3) -> Iterator[tuple[int, Record]]:
    """Step and record of each whole line ``{"step": …}``; what cannot be read is noted and left out."""
    if not path.is_file():
        return
    broken: list[int] = []
    half = False
    for number, line in _lines(path):
        record = None if line is None else parse_line(line)
        step = None if record is None else as_step(record.get("step"))
        if record is not None and step is not None:
            yield step, record
        elif line is None:
            half = True
        elif line.strip():
            broken.append(number)
    if half:
        notes.append(
            f"{path.name}: the last line is half written and left out; the run was killed, or is writing it "
            "now."
        )
    if broken:
        numbers = first_few(broken, max_complaints)
        notes.append(f"{path.name}: {len(broken)} line(s) are no records and are left out: {numbers}.")


def whole_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line, with its end; without half a last line."""
    yield from ((number, line) for number, line in _lines(path) if line is not None)


def _lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Number and text of each line; None for half a line, which a killed run leaves behind, or a run is
    writing now."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith("\n"):
                yield number, line
            else:
                yield number, None if parse_line(line) is None else f"{line}\n"


def numbers_of(record: Record) -> Iterator[tuple[str, float]]:
    """The metrics of a record, by name."""
    for name, value in record.items():
        if name != "step" and (number := as_number(value)) is not None:
            yield name, number


def as_number(value: object) -> float | None:
    """A metric's value: numbers, and the words for numbers that are not finite; None for anything else."""
    match value:
        case bool() | int() | float():
            try:
                return float(value)
            except OverflowError:
                return math.inf
        case None | "NaN" | "nan":
            return math.nan
        case "Infinity" | "inf":
            return math.inf
        case "-Infinity" | "-inf":
            return -math.inf
    return None


def as_step(value: object) -> int | None:
    """The number of a step; None for another value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_STEP:
        return None
    return int(value) if value == int(value) else None


def reading_notes(columns: Columns) -> list[str]:
    """What a reader has to say about the steps it found: how many, repeated ones, restarts, gaps."""
    steps = columns.steps
    notes = [f"{len(steps):,} steps were read, {steps[0]} to {steps[-1]}."] if steps else []
    if columns.repeated:
        notes.append(f"{columns.repeated} line(s) repeat a step; each step counts once, later values win.")
    notes += restart_notes(columns.restarts)
    # A log of every tenth step has no gaps.
    usual = median_high([b - a for a, b in pairwise(steps)] or [1])
    gaps = [(a + 1, b - 1) for a, b in pairwise(steps) if b - a > usual]
    if gaps:
        ranges = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:5])
        notes.append(f"{len(gaps)} gap(s) in the steps: {ranges}{', …' if len(gaps) > 5 else ''}.")
    return notes


class Samples:
    """The first and the newest samples of a run; those in between are left out where there are too many."""

    def __init__(self, most: int) -> None:
        self._most_first = most // 2
        self._first: list[SavedSample] = []
        self._newest = deque[SavedSample](maxlen=most - most // 2)
        self._count = 0

    def add(self, step: int, record: Record) -> None:
        """Take one."""
        sample = SavedSample(step, {name: cell for name, cell in record.items() if name != "step"})
        self._count += 1
        if len(self._first) < self._most_first:
            self._first.append(sample)
        else:
            self._newest.append(sample)

    def kept(self, notes: list[str]) -> list[SavedSample]:
        """Those that were kept, steps ascending; the notes say how many were not."""
        samples = sorted([*self._first, *self._newest], key=lambda sample: sample.step)
        if len(samples) < self._count:
            notes.append(
                f"{self._count:,} samples were recorded; the first {len(self._first):,} and the newest "
                f"{len(self._newest):,} were read."
            )
        return samples


def restart_notes(restarts: Sequence[tuple[int, int]]) -> list[str]:
    """The last of ``Columns.restarts`` in words."""
    return [
        f"The run went on at step {first} after it had reached {last}; the steps that it did again count "
        "once."
        for first, last in restarts[-3:]
    ]


def first_few(values: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first of ``values`` in a sentence, and an ellipsis where there are more."""
    return separator.join([*map(str, values[:most]), *["…"] * (len(values) > most)])
