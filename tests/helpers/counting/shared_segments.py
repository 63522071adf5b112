"""Shared memory that this process or its children made; other test processes make their own meanwhile."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from listening_sockets import family

_FOLDER = Path("/dev/shm")


def segments() -> set[str]:
    """Names of the segments in ``/dev/shm`` that no process outside this family has mapped."""
    ours = family(str(os.getpid()))
    foreign = ""
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name not in ours:
            try:
                foreign += (folder / "maps").read_text()
            except OSError:  # the process has ended, or is not ours to look at
                continue
    return {path.name for path in _FOLDER.glob("psm_*") if str(path) not in foreign}


@contextmanager
def nothing_left_behind(patience_seconds: float = 120.0) -> Iterator[None]:
    """What is made in the block is gone at its end; a killed process needs a moment to be cleaned up
    after."""
    before = segments()
    yield
    deadline = time.monotonic() + patience_seconds
    while segments() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not segments() - before
