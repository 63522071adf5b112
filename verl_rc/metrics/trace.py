"""The trace of a run: who did what, from when to when, one JSON line each. ``verl-rc trace`` shows it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from verl_rc.metrics.json_lines import set_aside

TRACE_FILE = "trace.jsonl"
STEP = "step"
"""The activity of the driver's span of a training step."""


class Trace:
    """Writes spans while ``writing``; otherwise every call does nothing."""

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    @property
    def is_writing(self) -> bool:
        """Whether spans are kept."""
        return self._file is not None

    @contextmanager
    def writing(self, path: Path | None) -> Iterator[None]:
        """Context in which spans are appended to ``path``, behind those of the run's earlier lives; None:
        nothing is written."""
        if path is None:
            yield
            return
        set_aside(path)
        with path.open("a", encoding="utf-8") as self._file:
            try:
                yield
            finally:
                self._file = None

    def span(self, process: str, activity: str, begin: float, end: float, **facts: Any) -> None:
        """Write that ``process`` did ``activity`` from ``begin`` to ``end``, seconds since 1970 by its own
        host's clock.

        ``facts``: anything else of the span. A call of a process has ``sent`` and ``received``, by the
        driver's clock, from which the reader finds how far the host's clock is off.
        """
        if self._file is not None:
            self._file.write(
                json.dumps({"who": process, "what": activity, "begin": begin, "end": end, **facts}) + "\n"
            )

    @contextmanager
    def driver(self, activity: str, **facts: Any) -> Iterator[None]:
        """Write a span of the driver that lasts as long as the context; not when it fails."""
        begin = time.time()
        yield
        self.span("driver", activity, begin, time.time(), **facts)

    def flush(self) -> None:
        """Hand what was written to the operating system, so that a killed run has its trace up to here."""
        if self._file is not None:
            self._file.flush()


TRACE = Trace()
"""The trace of this process's run; a process has one run at a time."""
