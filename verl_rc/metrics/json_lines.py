"""Files of JSON lines that a run appends to: what an earlier life of the run left in them and nobody
finished."""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

REPLACED = ".replaced.jsonl"
"""Ending of the file beside another one that holds the lines which were moved out of it."""
_MOST_NAMED = 5
_LOG = logging.getLogger("verl_rc")


def set_aside(path: Path, keeps: Callable[[Mapping[str, Any]], bool] = lambda record: True) -> None:
    """Move lines of ``path``, if there is such a file, to ``<name>.replaced.jsonl``: an incomplete last line,
    whole lines that are no records, which are logged, and records that ``keeps`` refuses.

    A crash at any moment loses no line.
    """
    moved: dict[int, bytes] = {}
    damaged: list[int] = []
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _record(line)
            if record is None or not keeps(record):
                moved[number] = line
            if record is None and line.endswith(b"\n"):
                damaged.append(number)
    if not moved:
        return
    replaced, beside = path.with_suffix(REPLACED), path.with_suffix(".partial")
    if damaged:
        lines = ", ".join([*map(str, damaged[:_MOST_NAMED]), *["…"] * (len(damaged) > _MOST_NAMED)])
        _LOG.warning("%s: damaged, moved to %s: line %s", path, replaced.name, lines)
    _write(replaced, "ab", path, (line.rstrip(b"\n") + b"\n" for line in moved.values()))
    with path.open("rb") as file:
        kept = (line for number, line in enumerate(file, start=1) if number not in moved)
        _write(beside, "wb", path, kept)
    beside.replace(path)


def _record(line: bytes) -> Mapping[str, Any] | None:
    """The object of a whole line; None for half a line, and for damage."""
    try:
        record = json.loads(line.decode()) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _write(path: Path, mode: str, like: Path, lines: Iterable[bytes]) -> None:
    """Write ``lines`` to the disk for sure, readable by those who may read ``like``."""
    with path.open(mode) as file:
        shutil.copymode(like, path)
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
