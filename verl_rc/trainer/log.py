"""The driver's log lines."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl_rc.printable import printable

_LOGGER = logging.getLogger("verl_rc")
log = _LOGGER.info
"""Log one line: a message with ``%`` fields, and their values."""


def log_to_stdout() -> None:
    """Write the driver's messages as plain lines to standard output."""
    if not _LOGGER.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_Printable("%(message)s"))
        _LOGGER.addHandler(handler)
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.propagate = False


class _Printable(logging.Formatter):
    """Messages hold exceptions of reward functions, and names in data files."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return printable(super().format(record))


@contextmanager
def log_wait(subject: str) -> Iterator[None]:
    """Log that the driver waits for ``subject``, and how many seconds the wait took."""
    log("waiting for %s …", subject)
    started = time.perf_counter()
    yield
    log("  %s: ready after %.1f s", subject, time.perf_counter() - started)
