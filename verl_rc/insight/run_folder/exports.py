"""W&B's exports of a run's history (CSV, JSON), of any trainer."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_rc.insight.run_folder.lines import as_step, numbers_of
from verl_rc.insight.run_folder.records import NothingToReadError
from verl_rc.records.token_records.token_rows import parse_line

SOURCE = "W&B export"
_STEP = "_step"
_TRAINING_STEP = "global_step"
"""Metric, in a section of any name, that holds the training step where W&B's own counts calls of ``log``."""

_LOOKED_AT = 1 << 20

Rows = Iterator[tuple[int, dict[str, float]]]


def export_rows(path: Path) -> Rows | None:
    """Step and metrics of each row of an exported history; None where the file is none.

    Raises ``NothingToReadError`` for a table of several runs, whose columns have the same metrics.
    """
    if path.suffix not in (".csv", ".json", ".jsonl") or not _names_a_step(path):
        return None
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            rows: list[Mapping[str, Any]] = list(csv.DictReader(file))
    else:
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            content = [parse_line(line) for line in text.splitlines()]
        rows = [row for row in content if isinstance(row, dict)] if isinstance(content, list) else []
    if not any(_STEP in row or "Step" in row for row in rows):
        return None
    runs = sorted({run for run, is_of_run, _ in map(_parts, rows[0]) if is_of_run})
    if len(runs) > 1:
        raise NothingToReadError(
            f"{path} must be the history of one run; it has columns of {', '.join(runs)}. Export one alone."
        )
    return _by_step(rows)


def _names_a_step(path: Path) -> bool:
    """Whether the beginning of a file names W&B's step, so that a long log of another kind is not read."""
    with path.open("rb") as file:
        head = file.read(_LOOKED_AT)
    return _STEP.encode() in head or b"Step" in head


def _by_step(rows: Iterable[Mapping[str, Any]]) -> Rows:
    """Step and metrics of each row that has both. Where the training step is logged, a row without one
    belongs to the training step of the row before."""
    training_step = None
    for row in rows:
        numbers = {_parts(name)[2]: number for name, number in numbers_of(row).items() if number == number}
        steps = [number for name, number in numbers.items() if name.rpartition("/")[2] == _TRAINING_STEP]
        training_step = _first_step(steps, training_step)
        calls = _first_step((numbers.get(_STEP), numbers.get("Step")), None)
        step = calls if training_step is None else training_step
        metrics = {name: number for name, number in numbers.items() if not name.startswith("_")}
        if step is not None and metrics:
            yield step, metrics


def _parts(name: object) -> tuple[str, str, str]:
    """Run, separator and metric of a column: the UI exports ``run - metric``."""
    return str(name).rpartition(" - ")


def _first_step(values: Iterable[object], otherwise: int | None) -> int | None:
    return next((step for step in map(as_step, values) if step is not None), otherwise)
