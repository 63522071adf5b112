"""One readable line a step, with the numbers people watch; a progress bar when a person is watching."""

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from verl_rc.metrics.sinks.protocol import Cell

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


class ConsoleSink:
    """Writes to standard output. Tables and histograms are left to the other sinks."""

    def __init__(self, total_steps: int, console: Console | None = None) -> None:
        """``total_steps`` of the run, for the bar and the time left; ``console`` for output elsewhere."""
        self._console = console or Console()
        self._total_steps = total_steps
        self._step_seconds: deque[float] = deque(maxlen=_NUM_STEPS_FOR_ETA)
        self._last_logged = time.monotonic()
        self._progress: Progress | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one line; moves the bar."""
        now = time.monotonic()
        seconds = metrics.get("timing_s/step", now - self._last_logged)
        self._last_logged = now
        if step > 0:
            self._step_seconds.append(seconds)
        line = self._line(metrics, step, seconds)
        if self._console.is_terminal:
            self._move_bar(step)
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Shows nothing."""

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Shows nothing."""

    def alert(self, title: str, text: str, step: int) -> None:
        """Writes a line for each line of ``text``."""
        for line in text.splitlines():
            self._console.print(f"warning: {title}: {line}", markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()

    def _line(self, metrics: Mapping[str, float], step: int, seconds: float) -> str:
        parts = [f"step {step}/{self._total_steps}"]
        parts += [f"{label} {metrics[name]:{form}}" for label, name, form in _WATCHED if name in metrics]
        tokens = metrics.get("perf/total_num_tokens")
        if tokens is not None and seconds > 0:
            parts.append(f"{tokens / seconds:,.0f} tok/s")
        parts += [_headline(name, value) for name, value in sorted(metrics.items()) if name.startswith(_HEADLINE_PREFIX)]
        parts.append(f"{seconds:.1f} s")
        if 0 < step < self._total_steps:
            parts.append(f"ETA {_clock(statistics.mean(self._step_seconds) * (self._total_steps - step))}")
        return "  ".join(parts)

    def _move_bar(self, step: int) -> None:
        if self._progress is None:
            columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task("training", total=self._total_steps)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=step)


def _headline(name: str, value: float) -> str:
    """``val-core/digits/sort/acc/mean@1`` -> ``val digits/sort acc 0.412``; other statistics keep their name."""
    words = name.removeprefix(_HEADLINE_PREFIX).replace("/acc/", " acc ").removesuffix(" mean@1")
    return f"val {words} {value:.3f}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
