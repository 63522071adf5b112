"""The driver's log lines: one per thing that it waits for."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger("verl_rc")


def speak_on_stdout() -> None:
    """Show the driver's messages as plain lines on standard output."""
    if not _log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        _log.addHandler(handler)
        _log.setLevel(logging.INFO)
        _log.propagate = False


def say(message: str, *arguments: object) -> None:
    """One line."""
    _log.info(message, *arguments)


@contextmanager
def announced(what: str) -> Iterator[None]:
    """Say what is being waited for, and how long it took."""
    _log.info("waiting for %s …", what)
    started = time.perf_counter()
    yield
    _log.info("  %s: ready after %.1f s", what, time.perf_counter() - started)
