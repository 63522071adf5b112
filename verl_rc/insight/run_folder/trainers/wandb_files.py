"""W&B: files of offline runs (``run-*.wandb``), and exports of a run's history (CSV, JSON), of any trainer.

A file of an offline run is a row of records in blocks of 32 KiB, as LevelDB's log has them; each record is a
protocol buffer ``Record``.
"""

import csv
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from verl_rc.data.token_rows import parse_line
from verl_rc.insight.run_folder.event_files import DamagedFileError, fields_of
from verl_rc.insight.run_folder.lines import as_step, numbers_of
from verl_rc.insight.run_folder.records import NothingToReadError

OFFLINE, EXPORT = "W&B offline run", "W&B export"
_HEADER = struct.Struct("<4sHB")
_MAGIC = (b":W&B", 0xBEE1, 0)
_BLOCK = 32 << 10
_PART = struct.Struct("<IHB")
"""Checksum, length and kind of a part of a record."""
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
# Field numbers of Record, HistoryRecord and HistoryItem.
_HISTORY, _ITEM, _KEY, _NESTED_KEY, _VALUE_JSON = 2, 1, 1, 2, 16
_STEP = "_step"
_TRAINING_STEP = "global_step"
"""Metric, in a section of any name, that holds the training step where W&B's own counts calls of ``log``."""

_LOOKED_AT = 1 << 20

Rows = Iterator[tuple[int, dict[str, float]]]


def is_offline(path: Path) -> Path | None:
    """The file of an offline run at a path; None where there is none."""
    if path.is_file():
        return path if path.suffix == ".wandb" else None
    return next(iter(sorted(path.glob("run-*.wandb"))), None)


def offline_rows(path: Path) -> Rows:
    """Step and metrics of each history record. Raises ``DamagedFileError`` where the bytes make no sense."""
    return _by_step(
        dict(_items(history))
        for record in _records(path)
        for number, history in fields_of(record)
        if number == _HISTORY and isinstance(history, bytes)
    )


def _items(history: bytes) -> Iterator[tuple[str, Any]]:
    for number, item in fields_of(history):
        if number != _ITEM or not isinstance(item, bytes):
            continue
        fields = [(field, value) for field, value in fields_of(item) if isinstance(value, bytes)]
        keys = [value.decode("utf-8", "replace") for field, value in fields if field in (_KEY, _NESTED_KEY)]
        values = [value for field, value in fields if field == _VALUE_JSON]
        if keys and values:
            try:
                yield ".".join(keys), json.loads(values[-1])
            except ValueError:
                continue


def _records(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size or _HEADER.unpack(header) != _MAGIC:
            raise DamagedFileError("it is no file of an offline run")
        place = _HEADER.size
        parts: list[bytes] = []
        while True:
            if _BLOCK - place % _BLOCK < _PART.size:  # the remainder of a block is padding
                place += len(file.read(_BLOCK - place % _BLOCK))
            head = file.read(_PART.size)
            if len(head) < _PART.size:
                return
            _, length, kind = _PART.unpack(head)
            data = file.read(length)
            place += _PART.size + len(data)
            if len(data) < length or kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
                return  # half a record, which a killed run leaves
            parts = [data] if kind in (_FULL, _FIRST) else [*parts, data]
            if kind in (_FULL, _LAST):
                yield b"".join(parts)


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
