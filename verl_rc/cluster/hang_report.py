"""Reports about processes that do not answer: their state from the kernel, their Python stacks, and what they wait for."""

import faulthandler
import os
import re
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_STABLE_SECONDS = 0.2
"""A stack dump that has not grown for this time is complete."""
_DUMP_SECONDS = 3.0
"""Time limit for a process to write its stacks."""
_STATES = {
    "T": "is stopped by a signal (SIGSTOP); SIGCONT would let it go on",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "X": "has ended",
    "D": "waits in the kernel for a device or a file system",
}


@dataclass(frozen=True)
class ProcessIdentity:
    """The node, pid and stack file of a process, with which another process of the node can inspect it."""

    node_id: str
    """Ray's name of its node."""
    pid: int
    started: int
    """Start time, clock ticks since boot; tells it from a later process with the same pid."""
    stack_file: str
    """File to which it writes its stacks on SIGUSR1."""


@dataclass(frozen=True)
class ProcessState:
    """The state of a process as seen from outside."""

    condition: str
    """``runs``, or the reason why it cannot answer, as a verb phrase."""
    stacks: str = ""
    """Python stacks of all its threads, newest frame first; empty when not available."""


def register_stack_dump(node_id: str) -> ProcessIdentity:
    """Let this process write its stacks to a file on SIGUSR1.

    faulthandler writes them in the C signal handler, without a thread or the GIL, so it works while the process blocks in a
    collective. The file has no name and vanishes with the process.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process lives: faulthandler keeps it)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    pid = os.getpid()
    status = _status(pid)
    assert status is not None
    return ProcessIdentity(node_id, pid, status[1], f"/proc/{pid}/fd/{file.fileno()}")


def inspect_process(identity: ProcessIdentity) -> ProcessState:
    """Inspect a process of this node."""
    status = _status(identity.pid)
    if status is None or status[1] != identity.started:
        return ProcessState(_STATES["Z"])
    if status[0] in "TtZX":
        return ProcessState(_STATES[status[0]])
    try:
        stacks = _dumped(identity)
    except OSError as error:
        return ProcessState(f"could not be inspected ({error})")
    if not stacks:
        return ProcessState(_STATES.get(status[0], f"did not write its stacks within {_DUMP_SECONDS:g} s"))
    return ProcessState("runs", stacks)


def kill(identity: ProcessIdentity) -> None:
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


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_SERVING = (re.compile(r'verl_rc/rollout/step_loop\.py", line \d+ in _run\b'), re.compile("verl_rc/cluster/remote.py"))
"""Frame of the thread that serves the driver's call; in an engine, the call only waits for the sampling thread."""
_COLLECTIVE = "torch/distributed/"


@dataclass(frozen=True)
class AwaitedProcess:
    """One process of a wait."""

    who: str
    what: str
    """What it was asked to do."""
    last_answer: str
    """What its last sign of life was."""
    state: ProcessState | None
    """Its state in the kernel; None: it has answered."""


@dataclass(frozen=True)
class TimedOutWait:
    """A wait of the driver that exceeded its time limit."""

    seconds: float
    limit_key: str
    """The configuration key that sets the limit."""
    processes: Sequence[AwaitedProcess]
    driver_stack: str
    free_resources: str


def summary(wait: TimedOutWait) -> str:
    """One line for each process that has not answered, and advice."""
    silent = [process for process in wait.processes if process.state is not None]
    answered = [process.who for process in wait.processes if process.state is None]
    names = ", ".join(f"{process.who} ({process.what})" for process in silent)
    lines = [f"these processes did not answer within {wait.seconds:.0f} s: {names}."]
    lines += [f"  {process.who}: {_condition(process)}; last sign of life: {process.last_answer}." for process in silent]
    if answered:
        lines.append(f"  These answered: {', '.join(answered)}.")
    lines.append(f"Free resources of the cluster: {wait.free_resources}. Raise {wait.limit_key} if they are only slow.")
    return "\n".join(lines)


def full_report(wait: TimedOutWait) -> str:
    """The summary, the driver's stack, and the stacks of every process that has not answered."""
    parts = [summary(wait), "The driver waits in (newest frame last):\n" + wait.driver_stack.rstrip()]
    for process in wait.processes:
        if process.state is not None:
            stacks = process.state.stacks or f"no stacks: it {process.state.condition}"
            parts.append(f"{process.who}, asked to {process.what} (newest frame first):\n{stacks}")
    return "\n\n".join(parts) + "\n"


def _condition(process: AwaitedProcess) -> str:
    assert process.state is not None
    frame = _innermost_frame(process.state.stacks)
    if frame is None:
        return process.state.condition
    waits = "waits in a collective for its peers, " if _in_collective(process.state.stacks) else ""
    return f"{waits}at {frame}"


def _innermost_frame(stacks: str) -> str | None:
    """The innermost frame of the thread that serves the driver's call, or of any thread without such a one."""
    frame = _FRAME.search(_serving_thread(stacks))
    return None if frame is None else f"{frame['function']} ({frame['file']}:{frame['line']})"


def _in_collective(stacks: str) -> bool:
    frames = _FRAME.findall(_serving_thread(stacks))
    return any(_COLLECTIVE in file for file, _, _ in frames[:4])


def _serving_thread(stacks: str) -> str:
    threads = re.split(r"\n\s*\n|\n(?=(?:Current t|T)hread 0x)", stacks)
    return next((thread for mark in _SERVING for thread in threads if mark.search(thread)), threads[0])
