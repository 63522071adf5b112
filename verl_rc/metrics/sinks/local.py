"""The protocol of a sink, and the two sinks without dependencies: the console, and JSON lines in the run's
folder."""

import json
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_rc.config.folder_owner import FolderClaim
from verl_rc.metrics.json_lines import REPLACED, set_aside
from verl_rc.printable import printable

Cell = str | int | float | bool | None
"""One cell of a table."""


@dataclass(frozen=True)
class AlertCause:
    """The cause that an alert names, where one is known."""

    name: str
    since_step: int
    evidence: Mapping[str, float]
    """Medians of the metrics that name it, without their prefix."""


class MetricSink:
    """Shows or stores the output of a run. A sink leaves out the kinds that it cannot show."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the reduced metrics of one step."""

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Take a table, such as validation samples; every row has one cell a column."""

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Take a histogram: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Send an alert to the user; ``text`` may have several lines."""

    def close(self) -> None:
        """Flush and close the sink; nothing may be logged afterwards."""


@dataclass(frozen=True)
class FinalReport:
    """The last report on a run that has ended."""

    verdict: str
    code: str
    """The verdict for filters: its level and causes."""
    page: str
    """The page as HTML."""


class ExperimentSink(MetricSink):
    """A sink that keeps a run of its own, which goes on until the report is written."""

    run_id: str
    """The id of that run, stored in checkpoints."""

    def publish(self, report: FinalReport) -> None:
        """Keep the report with the run; raises ``RuntimeError`` or ``OSError`` when that fails."""

    def finish(self, exit_status: int) -> None:
        """End the run, as failed unless ``exit_status`` is 0; nothing may be logged or published
        afterwards."""

    def close(self) -> None:
        """End the run without saying how it ended."""
        self.finish(0)


_WATCHED: tuple[tuple[str, str, str], ...] = (
    ("reward", "critic/score/mean", ".3f"),
    ("len", "response_length/mean", ".1f"),
    ("pg_loss", "actor/pg_loss", ".3g"),
    ("grad", "actor/grad_norm", ".3g"),
    ("ESS", "rollout_corr/rollout_is_eff_sample_size", ".3f"),
    ("|gap|", "sync/rollout_gap_mean", ".2g"),
    ("rejected", "rollout_corr/rollout_rs_masked_fraction", ".1%"),
)
_HEADLINE_PREFIX = "val-core/"
_NUM_STEPS_FOR_ETA = 20


class ConsoleSink(MetricSink):
    """Writes to standard output. Tables and histograms are left to the other sinks."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        """``total_steps`` of the run, for the bar and the time left; ``console`` for output elsewhere."""
        self._console = console or Console()
        self._total_steps = total_steps
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS_FOR_ETA)
        self._last_logged = time.monotonic()
        self._progress: Progress | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one line; move the bar."""
        logged = time.monotonic()
        seconds = metrics.get("timing_s/step", logged - self._last_logged)
        self._last_logged = logged
        if step > 0:
            self._step_seconds.append(seconds)
        line = self._line(metrics, step, seconds)
        if self._console.is_terminal:
            self._advance_progress_bar(step)
        self._print(line)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Write a line for each line of ``text``."""
        for line in text.splitlines():
            self._print(f"warning: {title}: {line}")

    def _print(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()

    def _line(self, metrics: Mapping[str, float], step: int, seconds: float) -> str:
        parts = [f"step {step}/{self._total_steps}"]
        parts += [f"{label} {metrics[name]:{form}}" for label, name, form in _WATCHED if name in metrics]
        tokens = metrics.get("perf/total_num_tokens")
        if tokens is not None and seconds > 0:
            parts.append(f"{tokens / seconds:,.0f} tok/s")
        parts += [
            _headline(name, value)
            for name, value in sorted(metrics.items())
            if name.startswith(_HEADLINE_PREFIX)
        ]
        parts.append(f"{seconds:.1f} s")
        if 0 < step < self._total_steps:
            parts.append(f"ETA {_clock(statistics.mean(self._step_seconds) * (self._total_steps - step))}")
        return "  ".join(parts)

    def _advance_progress_bar(self, step: int) -> None:
        if self._progress is None:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("training", total=self._total_steps)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step)


def _headline(name: str, value: float) -> str:
    """``val-core/digits/sort/acc/mean@1`` -> ``val digits/sort acc 0.412``; other statistics keep their
    name."""
    words = name.removeprefix(_HEADLINE_PREFIX).replace("/acc/", " acc ").removesuffix(" mean@1")
    return f"val {words} {value:.3f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"


Record = dict[str, object]
_FILES = ("metrics.jsonl", "histograms.jsonl", "alerts.jsonl")


class JsonlSink(MetricSink):
    """Writes ``metrics.jsonl``, ``histograms.jsonl``, ``alerts.jsonl`` and ``tables/<name>.jsonl``, flushed
    line by line.

    The lines are strict JSON: a number that is not finite becomes the string ``"NaN"``, ``"Infinity"`` or
    ``"-Infinity"``, which ``float`` reads back. A resumed run continues the files: no step is in them twice.
    """

    def __init__(self, run_dir: Path, steps_done: int = 0) -> None:
        """Files appear with their first line. The run's folder belongs to this process until ``close``.

        ``steps_done``: steps that the run goes on after, 0 for a new one. Lines of later steps, which it
        repeats, move to ``<name>.replaced.jsonl``, and so do lines that a killed run left damaged.
        """
        self._run_dir = run_dir
        self._claim = FolderClaim(run_dir, "metrics")
        self._files: dict[str, IO[str]] = {}
        self._edges: dict[str, tuple[float, ...]] = {}
        for path in [run_dir / name for name in _FILES] + sorted(run_dir.glob("tables/*.jsonl")):
            if not path.name.endswith(REPLACED):
                set_aside(path, lambda record: steps_done > 0 and _is_of_step_up_to(steps_done, record))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append one line ``{"step": …, name: value, …}``."""
        self._append(
            "metrics.jsonl", {"step": step, **{name: _json_number(value) for name, value in metrics.items()}}
        )

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Append one line a row to ``tables/<name>.jsonl``; a slash in the name becomes a hyphen."""
        for row in rows:
            cells = (_json_number(cell) if isinstance(cell, float) else cell for cell in row)
            self._append(
                f"tables/{name.replace('/', '-')}.jsonl",
                {"step": step, **dict(zip(columns, cells, strict=True))},
            )

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Append one line ``{"step", "name", "edges", "bins"}``; ``bins``: number and count of each bin that
        holds any.

        Edges, a thousand of them, are in the first line only, and where they change.
        """
        record: Record = {"step": step, "name": name}
        if self._edges.get(name) != tuple(edges):
            self._edges[name] = tuple(edges)
            record["edges"] = list(map(_json_number, edges))
        record["bins"] = [[index, _json_number(count)] for index, count in enumerate(counts) if count]
        self._append("histograms.jsonl", record)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Append one line ``{"step", "title", "text"}`` to ``alerts.jsonl``; with ``cause``, ``since_step``
        and ``evidence`` where a cause is known."""
        record: Record = {"step": step, "title": title, "text": text}
        if cause is not None:
            evidence = {name: _json_number(value) for name, value in cause.evidence.items()}
            record |= {"cause": cause.name, "since_step": cause.since_step, "evidence": evidence}
        self._append("alerts.jsonl", record)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._claim.release()

    def _append(self, relative_path: str, record: Record) -> None:
        self._claim.require()
        if relative_path not in self._files:
            path = self._run_dir / relative_path
            path.parent.mkdir(parents=True, exist_ok=True)
            # JSON's own way to write half a surrogate pair
            self._files[relative_path] = path.open("a", encoding="utf-8", errors="backslashreplace")
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


def _is_of_step_up_to(last_step: int, record: Mapping[str, object]) -> bool:
    step = record.get("step")
    return isinstance(step, int) and step <= last_step
