"""The trace of a run: who did what, from when to when, as events of Chrome's trace format.

The file is a JSON array that is never closed, one event a line: https://ui.perfetto.dev and chrome://tracing
read it so, also while the run goes on, and after it was killed.
"""

import json
import math
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

TRACE_FILE = "trace.json"


@dataclass
class _TracedProcess:
    """The known facts of a process that has spans."""

    number: int
    """The ``pid`` in the file, the same in all lives of a run."""
    ends: list[float] = field(default_factory=list)
    """End of the last span in each row. Perfetto shows spans of one row only where they do not overlap."""
    lower: float = -math.inf
    upper: float = math.inf
    """The process's clock is ahead of the driver's by seconds between these."""

    @property
    def clock_offset(self) -> float:
        """Seconds that the process's clock is ahead of the driver's; 0 where its calls allow 0."""
        return 0.0 if self.lower <= 0 <= self.upper else (self.lower + self.upper) / 2

    def row(self, begin: float, end: float) -> int:
        """The first row whose last span has ended at ``begin``; the row's last span ends at ``end`` now."""
        row = next((row for row, last in enumerate(self.ends) if last <= begin), len(self.ends))
        self.ends[row : row + 1] = [end]
        return row


class Trace:
    """Writes spans while ``writing``; otherwise every call does nothing."""

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._processes: dict[str, _TracedProcess] = {}

    @property
    def is_writing(self) -> bool:
        """Whether spans are recorded."""
        return self._file is not None

    @contextmanager
    def writing(self, path: Path | None) -> Iterator[None]:
        """Context in which spans are appended to ``path``, behind those of the run's earlier lives. Without a
        path nothing is written."""
        if path is None:
            yield
            return
        self._processes = {}
        with path.open("a+b") as self._file:
            self._file.seek(0)
            whole = sum(len(line) for line in self._file if line.endswith(b"\n"))
            self._file.truncate(whole)  # a killed run leaves half an event
            if not whole:
                self._file.write(b"[\n")
            try:
                yield
            finally:
                self._file = None

    def span(
        self,
        process: str,
        activity: str,
        begin: float,
        end: float,
        call: tuple[float, float] | None = None,
        **facts: Any,
    ) -> None:
        """Write that ``process`` did ``activity`` from ``begin`` to ``end``, seconds since 1970 by its own
        host's clock.

        Args:
            process: name of a process or of a role in it.
            activity: what it did.
            begin: when it began.
            end: when it had ended.
            call: when the driver asked for it and when it had the answer, by the driver's clock. A call
                begins after the one and ends before the other, which bounds how far the host's clock is off.
            facts: anything else of the span.
        """
        if not self.is_writing:
            return
        if process not in self._processes:
            number = zlib.crc32(process.encode()) >> 1
            self._processes[process] = _TracedProcess(number)
            self._write(ph="M", name="process_name", pid=number, args={"name": process})
        known = self._processes[process]
        if call is not None:
            known.lower, known.upper = max(known.lower, end - call[1]), min(known.upper, begin - call[0])
        begin, end = begin - known.clock_offset, end - known.clock_offset
        times = {"ts": round(begin * 1e6), "dur": round((end - begin) * 1e6)}
        row = known.row(begin, end)
        self._write(ph="X", name=activity, pid=known.number, tid=row, **times, args=facts)

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

    def _write(self, **event: Any) -> None:
        if self._file is not None:
            self._file.write(f"{json.dumps(event)},\n".encode())


TRACE = Trace()
"""The trace of this process's run; a process has one run at a time."""
