"""What a process does that answers nobody: its state and its Python stacks, as the kernel and faulthandler tell them."""

import faulthandler
import os
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_STABLE_SECONDS = 0.2
"""A dump that has not grown for so long is complete."""
_DUMP_SECONDS = 3.0
"""How long a process may take to write its stacks."""
_STATES = {
    "T": "is stopped by a signal (SIGSTOP); SIGCONT would let it go on",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "D": "waits in the kernel for a device or a file system",
}


@dataclass(frozen=True)
class ProcessIdentity:
    """Where a process is and how to look into it from beside it."""

    node_id: str
    """Ray's name of its node."""
    pid: int
    started: int
    """When it started, clock ticks since boot: a later process with the same pid has another."""
    stack_file: str
    """What it writes its stacks to when it gets SIGUSR1."""


@dataclass(frozen=True)
class Finding:
    """What was seen of a process from outside."""

    condition: str
    """``runs``, or why it cannot answer; a predicate of the process."""
    stacks: str = ""
    """Python stacks of all its threads, newest frame first; empty where there are none to be had."""


def register_stack_dump(node_id: str) -> ProcessIdentity:
    """Let this process write its stacks down whenever it gets SIGUSR1.

    faulthandler writes them in the signal handler itself, in C: it needs no thread and no interpreter lock, so it also works
    while the process blocks in a collective. The file has no name and vanishes with the process.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process lives: faulthandler keeps it)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    pid = os.getpid()
    status = _status(pid)
    assert status is not None
    return ProcessIdentity(node_id, pid, status[1], f"/proc/{pid}/fd/{file.fileno()}")


def examine(identity: ProcessIdentity) -> Finding:
    """Look into a process of this node."""
    status = _status(identity.pid)
    if status is None or status[1] != identity.started:
        return Finding(_STATES["Z"])
    if status[0] in "TtZX":
        return Finding(_STATES[status[0]])
    try:
        stacks = _dumped(identity)
    except OSError as error:
        return Finding(f"could not be looked into ({error})")
    if not stacks:
        return Finding(_STATES.get(status[0], f"did not write its stacks within {_DUMP_SECONDS:g} s"))
    return Finding("runs", stacks)


def end(identity: ProcessIdentity) -> None:
    """Kill a process of this node, even one that is stopped."""
    status = _status(identity.pid)
    if status is not None and status[1] == identity.started:
        os.kill(identity.pid, signal.SIGKILL)


def _dumped(identity: ProcessIdentity) -> str:
    path = Path(identity.stack_file)
    start = size = path.stat().st_size
    os.kill(identity.pid, signal.SIGUSR1)
    deadline, grown = time.monotonic() + _DUMP_SECONDS, time.monotonic()
    while time.monotonic() < deadline and (size == start or time.monotonic() - grown < _STABLE_SECONDS):
        time.sleep(0.02)
        if path.stat().st_size != size:
            size, grown = path.stat().st_size, time.monotonic()
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").strip()


def _status(pid: int) -> tuple[str, int] | None:
    """State letter and start time of a process; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return fields[0], int(fields[19])
