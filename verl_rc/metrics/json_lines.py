"""Files of JSON lines that a run appends to: what an earlier life of the run left in them and nobody
finished."""

import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from verl_rc.config.files import whole_or_absent

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
    replaced = path.with_suffix(REPLACED)
    if damaged:
        lines = ", ".join([*map(str, damaged[:_MOST_NAMED]), *["…"] * (len(damaged) > _MOST_NAMED)])
        _LOG.warning("%s: damaged, moved to %s: line %s", path, replaced.name, lines)
    with replaced.open("ab") as file:
        _write(file, path, (line.rstrip(b"\n") + b"\n" for line in moved.values()))
    with path.open("rb") as old, whole_or_absent(path) as new:
        _write(new, path, (line for number, line in enumerate(old, start=1) if number not in moved))


def _record(line: bytes) -> Mapping[str, Any] | None:
    """The object of a whole line; None for half a line, and for damage."""
    try:
        record = json.loads(line.decode()) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _write(file: BinaryIO, like: Path, lines: Iterable[bytes]) -> None:
    """Write ``lines`` to the disk for sure, readable by those who may read ``like``."""
    os.fchmod(file.fileno(), stat.S_IMODE(like.stat().st_mode))
    file.writelines(lines)
    file.flush()
    os.fsync(file.fileno())
