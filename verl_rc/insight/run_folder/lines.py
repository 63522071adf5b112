"""Lines of logs: JSON objects, numbers and steps, and notes about the unreadable ones."""

import io
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from errno import EFBIG
from itertools import islice, pairwise
from pathlib import Path
from statistics import median_high
from typing import Any, TextIO

from verl_rc.config.files import RefusedFileError, open_inside
from verl_rc.insight.run_folder.records import LARGEST_STEP, Columns, SavedSample
from verl_rc.records.token_records.token_rows import parse_line

Record = dict[str, Any]


_LARGEST_FILE = 16 << 30
_LONGEST_LINE = 64 << 20
"""Bytes of a file, and characters of a line. A file of holes takes no place on the disk that it was sent
from."""


def open_text(path: Path, folder: Path | None) -> TextIO:
    """Open a text below ``folder``, as ``open_inside`` does. Raises ``RefusedFileError``, also for a file of
    unreasonable size."""
    file = open_inside(folder, path)
    size = os.fstat(file.fileno()).st_size
    if size > _LARGEST_FILE:
        file.close()
        raise RefusedFileError(EFBIG, f"it must have at most {_LARGEST_FILE >> 30} GiB", str(path))
    return io.TextIOWrapper(file, encoding="utf-8", errors="replace")


def lines_of(file: TextIO) -> Iterator[str]:
    """The lines of a text; one that is longer than any record comes in parts, which are none."""
    while line := file.readline(_LONGEST_LINE):
        yield line


def read_records(
    path: Path, notes: list[str], max_complaints: int = 3, folder: Path | None = None
) -> Iterator[tuple[int, Record]]:
    """Step and further fields of each whole line ``{"step": …}``; lines that cannot be read are noted and
    left out.

    ``folder``: as ``open_inside`` takes it. A file that leaves it is noted and left out.
    """
    if not path.is_file():
        return
    try:
        file = open_text(path, folder)
    except RefusedFileError as error:
        notes.append(f"{path.name} is left out: {error.strerror}.")
        return
    broken: list[int] = []
    is_cut_off = False
    for number, line in _lines(file):
        record = parse_line(line or "") or {}
        step = as_step(record.pop("step", None))
        if step is not None:
            yield step, record
        elif line is None:
            is_cut_off = True
        elif line.strip():
            broken.append(number)
    if is_cut_off:
        notes.append(
            f"{path.name}: the last line is half written and left out; the run was killed, or is writing it "
            "now."
        )
    if broken:
        numbers = first_few(broken, max_complaints)
        notes.append(f"{path.name}: {len(broken)} line(s) are no records and are left out: {numbers}.")


def _lines(text: TextIO) -> Iterator[tuple[int, str | None]]:
    """Number and text of each line; None for half a line, which a killed run leaves behind, or a run is
    writing now."""
    with text as file:
        for number, line in enumerate(lines_of(file), start=1):
            if line.endswith("\n"):
                yield number, line
            else:
                yield number, None if parse_line(line) is None else f"{line}\n"


def numbers_of(record: object) -> dict[str, float]:
    """The metrics of a record by name; empty for a value that is no mapping."""
    fields = record.items() if isinstance(record, dict) else ()
    return {name: number for name, value in fields if (number := as_number(value)) is not None}


def as_number(value: Any) -> float | None:
    """A metric's value: a number, or text that ``float`` reads; NaN for null; None for anything else."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def as_step(value: object) -> int | None:
    """The number of a step, or None if the value is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST_STEP:
        return None
    return int(value) if value == int(value) else None


def reading_notes(columns: Columns) -> list[str]:
    """Sentences on the steps that a reader found: their number, repeated ones, restarts, gaps."""
    steps = columns.steps
    notes = [f"{len(steps):,} steps were read, {steps[0]} to {steps[-1]}."] if steps else []
    if columns.repeated:
        notes.append(f"{columns.repeated} line(s) repeat a step; each step counts once, later values win.")
    notes += _restart_notes(columns.restarts)
    # A log of every tenth step has no gaps.
    usual = median_high([b - a for a, b in pairwise(steps)] or [1])
    gaps = [(a + 1, b - 1) for a, b in pairwise(steps) if b - a > usual]
    if gaps:
        ranges = ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in gaps[:5])
        notes.append(f"{len(gaps)} gap(s) in the steps: {ranges}{', …' if len(gaps) > 5 else ''}.")
    return notes


def first_and_newest(samples: Iterable[SavedSample], most: int, notes: list[str]) -> list[SavedSample]:
    """The first and the newest samples of a run, at most ``most``, steps ascending; the notes say how many
    are left out."""
    samples = iter(samples)
    first, newest = list(islice(samples, most // 2)), deque[SavedSample](maxlen=most - most // 2)
    count = len(first)
    for sample in samples:
        newest.append(sample)
        count += 1
    selection = sorted([*first, *newest], key=lambda sample: sample.step)
    if len(selection) < count:
        notes.append(
            f"{count:,} samples were recorded; the first {len(first):,} and the newest {len(newest):,} were "
            "read."
        )
    return selection


def _restart_notes(restarts: Sequence[tuple[int, int]]) -> list[str]:
    """The last of ``Columns.restarts`` in words."""
    return [
        f"The run went on at step {first} after it had reached {last}; the steps that it did again count "
        "once."
        for first, last in restarts[-3:]
    ]


def first_few(values: Sequence[object], most: int, separator: str = ", ") -> str:
    """The first of ``values`` in a sentence, and an ellipsis where there are more."""
    return separator.join([*map(str, values[:most]), *["…"] * (len(values) > most)])
