"""Metrics, tables and histograms as JSON lines in the run's folder."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from verl_rc.metrics.sinks.protocol import Cell

Record = dict[str, object]


class JsonlSink:
    """Writes ``metrics.jsonl``, ``histograms.jsonl``, ``alerts.jsonl`` and ``tables/<name>.jsonl``, flushed line by line.

    The lines are strict JSON: a number that is not finite becomes the string ``"NaN"``, ``"Infinity"`` or
    ``"-Infinity"``, which ``float`` reads back. A resumed run continues the files: lines of steps later than its first
    are set aside.
    """

    def __init__(self, run_dir: Path) -> None:
        """Creates ``run_dir`` if need be; files appear with their first line."""
        self._run_dir = run_dir
        self._files: dict[str, IO[str]] = {}

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
            _set_aside_later_steps(path, _step_of(record))
            self._files[relative_path] = path.open("a", encoding="utf-8")
        file = self._files[relative_path]
        file.write(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n")
        file.flush()


def _json_number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _step_of(record: Record) -> int:
    step = record["step"]
    if not isinstance(step, int):
        raise TypeError(f"the step of a metrics line must be an integer, got {step!r}.")
    return step


def _set_aside_later_steps(path: Path, first_step: int) -> None:
    """Makes ``path`` end before the steps that this run is about to write; the file as it was stays beside it.

    A run that starts at step 0 is a new one and keeps nothing; a resumed one keeps the lines up to ``first_step``.
    """
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if first_step > 0 and _is_before(line, first_step)]
    if kept == lines:
        return
    aside = path.with_name(f"{path.stem}.before_step_{first_step}{path.suffix}")
    path.replace(aside)
    path.write_text("".join(kept), encoding="utf-8")


def _is_before(line: str, first_step: int) -> bool:
    """False also for a line that a killed run left half-written."""
    try:
        return line.endswith("\n") and int(json.loads(line)["step"]) <= first_step
    except (ValueError, KeyError, TypeError):
        return False
