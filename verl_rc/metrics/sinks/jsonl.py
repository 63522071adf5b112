"""Metrics, tables and histograms as JSON lines in the run's folder."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from verl_rc.metrics.sinks.protocol import Cell

Record = dict[str, object]
_FILES = ("metrics.jsonl", "histograms.jsonl", "alerts.jsonl")
_REPLACED = ".replaced.jsonl"


class JsonlSink:
    """Writes ``metrics.jsonl``, ``histograms.jsonl``, ``alerts.jsonl`` and ``tables/<name>.jsonl``, flushed line by line.

    The lines are strict JSON: a number that is not finite becomes the string ``"NaN"``, ``"Infinity"`` or
    ``"-Infinity"``, which ``float`` reads back. A resumed run continues the files: no step is in them twice.
    """

    def __init__(self, run_dir: Path, steps_done: int = 0) -> None:
        """Files appear with their first line, ``run_dir`` with the first file.

        ``steps_done``: steps that the run goes on after, 0 for a new one. Lines of later steps, which it repeats, move to
        ``<name>.replaced.jsonl``.
        """
        self._run_dir = run_dir
        self._files: dict[str, IO[str]] = {}
        for path in [run_dir / name for name in _FILES] + sorted(run_dir.glob("tables/*.jsonl")):
            if path.exists() and not path.name.endswith(_REPLACED):
                _set_aside_later_steps(path, steps_done)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends one line ``{"step": …, name: value, …}``."""
        self._append("metrics.jsonl", {"step": step, **{name: _json_number(value) for name, value in metrics.items()}})

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Appends one line a row to ``tables/<name>.jsonl``; a slash in the name becomes a hyphen."""
        for row in rows:
            cells = (_json_number(cell) if isinstance(cell, float) else cell for cell in row)
            self._append(f"tables/{name.replace('/', '-')}.jsonl", {"step": step, **dict(zip(columns, cells, strict=True))})

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Appends one line ``{"step", "name", "edges", "counts"}``."""
        self._append(
            "histograms.jsonl",
            {
                "step": step,
                "name": name,
                "edges": list(map(_json_number, edges)),
                "counts": list(map(_json_number, counts)),
            },
        )

    def alert(self, title: str, text: str, step: int) -> None:
        """Appends one line ``{"step", "title", "text"}`` to ``alerts.jsonl``."""
        self._append("alerts.jsonl", {"step": step, "title": title, "text": text})

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _append(self, relative_path: str, record: Record) -> None:
        if relative_path not in self._files:
            path = self._run_dir / relative_path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._files[relative_path] = path.open("a", encoding="utf-8")
        try:
            self._files[relative_path].write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
            self._files[relative_path].flush()
        except OSError:
            with suppress(OSError):  # what did not fit the disk is tried again when the file is closed
                self._files.pop(relative_path).close()
            raise


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _set_aside_later_steps(path: Path, steps_done: int) -> None:
    """Make ``path`` end after ``steps_done`` steps; the lines after them are moved. A crash at any moment loses no line."""
    kept: list[str] = []
    later: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            (kept if steps_done > 0 and _is_of_step_up_to(steps_done, line) else later).append(line)
    if not later:
        return
    with path.with_suffix(_REPLACED).open("a", encoding="utf-8") as replaced:
        replaced.writelines(line.rstrip("\n") + "\n" for line in later)
    beside = path.with_suffix(".partial")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(path)


def _is_of_step_up_to(last_step: int, line: str) -> bool:
    """False also for a line that a killed run left half-written."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= last_step
    except (ValueError, KeyError, TypeError):
        return False
