"""The watchdog: time limits of the driver's waits, reports about processes that do not answer, and killing
all processes."""

import faulthandler
import os
import re
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rc.config.processes import process_status

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

    faulthandler writes them in the C signal handler, without a thread or the GIL, so it works while the
    process blocks in a collective. The file has no name and vanishes with the process.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the process lives: faulthandler keeps it)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    pid = os.getpid()
    status = process_status(pid)
    assert status is not None
    return ProcessIdentity(node_id, pid, status[1], f"/proc/{pid}/fd/{file.fileno()}")


def inspect_process(identity: ProcessIdentity) -> ProcessState:
    """Inspect a process of this node."""
    status = process_status(identity.pid)
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
    status = process_status(identity.pid)
    if status is not None and status[1] == identity.started:
        with suppress(ProcessLookupError):  # it has ended since
            os.kill(identity.pid, signal.SIGKILL)


def _dumped(identity: ProcessIdentity) -> str:
    path = Path(identity.stack_file)
    start = size = path.stat().st_size
    os.kill(identity.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _DUMP_SECONDS
    grew_at = time.monotonic()
    while time.monotonic() < deadline and (size == start or time.monotonic() - grew_at < _STABLE_SECONDS):
        time.sleep(0.02)
        if path.stat().st_size != size:
            size, grew_at = path.stat().st_size, time.monotonic()
    with path.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace").strip()


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
_SERVING = (
    re.compile(r'verl_rc/runtime/rollout/step_loop\.py", line \d+ in _run\b'),
    re.compile("verl_rc/trainer/cluster/remote.py"),
)
"""Frame of the thread that serves the driver's call; in an engine, the call only waits for the sampling
thread."""
_COLLECTIVE = "torch/distributed/"


@dataclass(frozen=True)
class AwaitedProcess:
    """One process of a wait."""

    name: str
    task: str
    """The call that it was asked to do."""
    last_answer: str
    """The process's last sign of life."""
    state: ProcessState | None
    """The process's state in the kernel. None if it has answered."""


def summary(
    processes: Sequence[AwaitedProcess], seconds: float, limit_key: str, free_resources: object
) -> str:
    """One line for each process that has not answered within ``seconds``, the value of the configuration's
    ``limit_key``, and advice."""
    silent = [process for process in processes if process.state is not None]
    answered = [process.name for process in processes if process.state is None]
    names = ", ".join(f"{process.name} ({process.task})" for process in silent)
    lines = [f"these processes did not answer within {seconds:.0f} s: {names}."]
    lines += [
        f"  {process.name}: {_condition(process)}; last sign of life: {process.last_answer}."
        for process in silent
    ]
    if answered:
        lines.append(f"  These answered: {', '.join(answered)}.")
    lines.append(f"Free resources of the cluster: {free_resources}. Raise {limit_key} if they are only slow.")
    return "\n".join(lines)


def full_report(short: str, processes: Sequence[AwaitedProcess], driver_stack: str) -> str:
    """The summary, the driver's stack, and the stacks of every process that has not answered."""
    parts = [short, "The driver waits in (newest frame last):\n" + driver_stack.rstrip()]
    for process in processes:
        if process.state is not None:
            stacks = process.state.stacks or f"no stacks: it {process.state.condition}"
            parts.append(f"{process.name}, asked to {process.task} (newest frame first):\n{stacks}")
    return "\n\n".join(parts) + "\n"


def _condition(process: AwaitedProcess) -> str:
    assert process.state is not None
    frames = _FRAME.findall(_serving_thread(process.state.stacks))
    if not frames:
        return process.state.condition
    file, line, function = frames[0]
    in_collective = any(_COLLECTIVE in path for path, _, _ in frames[:4])
    return f"{'waits in a collective for its peers, ' if in_collective else ''}at {function} ({file}:{line})"


def _serving_thread(stacks: str) -> str:
    """The stack of the thread that serves the driver's call, or of the first thread if none does."""
    threads = re.split(r"\n\s*\n|\n(?=(?:Current t|T)hread 0x)", stacks)
    return next((thread for mark in _SERVING for thread in threads if mark.search(thread)), threads[0])


_LOOK_SECONDS = 30.0
"""Time limit for inspecting processes of other nodes."""
_IDENTITY_SECONDS = 1.0


class WatchedProcess(Protocol):
    """The interface of a process to the watchdog."""

    name: str
    identity: "ray.ObjectRef[Any]"
    """Requested when the process was started, because a hanging process could not answer."""
    last_answer: tuple[str, float] | None
    """The last answered call and its ``time.monotonic`` in seconds; None before the first answer."""


class Watchdog:
    """Limits every wait for remote processes, inspects those that do not answer, and can kill all of them."""

    def __init__(self) -> None:
        self._processes: WeakSet[Any] = WeakSet()
        self.limit_seconds: float | None = None
        """Time limit of waits that give none themselves. None means unlimited."""
        self._folder: Path | None = None

    @contextmanager
    def watching(self, limit_seconds: float, folder: Path) -> Iterator[None]:
        """Context in which waits end after ``limit_seconds`` and reports are written to ``folder``.

        An error inside kills all processes, because a hanging process would not react to a request to end.
        """
        self.limit_seconds, self._folder = limit_seconds, folder
        try:
            yield
        except SystemExit:  # a requested end (a signal), not a failure
            raise
        except BaseException:
            self.end_all()
            raise
        finally:
            self.limit_seconds, self._folder = None, None

    def add(self, process: WatchedProcess) -> None:
        """Watch a process as long as a reference to it exists."""
        self._processes.add(process)

    def forget_all(self) -> None:
        """Stop watching all processes; a new Ray session cannot reach processes of an earlier one."""
        self._processes.clear()

    def report(
        self,
        calls: Sequence[tuple[WatchedProcess, str]],
        silent: Sequence[WatchedProcess],
        seconds: float,
        limit_key: str,
    ) -> str:
        """Inspect the ``silent`` processes among those of ``calls``, write the report file and return its
        summary."""
        states = inspect_processes(silent)
        processes = [
            AwaitedProcess(process.name, task, _last_answer(process), states.get(id(process)))
            for process, task in calls
        ]
        short = summary(processes, seconds, limit_key, ray.available_resources())
        if self._folder is None:
            return short
        path = self._folder / f"hang-{datetime.now(UTC):%Y%m%dT%H%M%S}.txt"
        driver_stack = "".join(traceback.format_stack()[:-2])
        path.write_text(full_report(short, processes, driver_stack), encoding="utf-8")
        return f"{short}\nTheir Python stacks are in {path}."

    def end_all(self) -> None:
        """Kill every remaining process on every node, also stopped ones."""
        for process in list(self._processes):
            end_process(process)


WATCHDOG = Watchdog()
"""The watchdog of this process."""


def inspect_processes(processes: Sequence[WatchedProcess]) -> dict[int, ProcessState]:
    """The state of each process, inspected on its node, by ``id`` of the process."""
    states, elsewhere = {}, {}
    for process in processes:
        identity = identity_of(process)
        if identity is None:
            states[id(process)] = ProcessState("has not started")
        elif _is_here(identity):
            states[id(process)] = inspect_process(identity)
        else:
            elsewhere[_on_node(inspect_process, identity)] = id(process)
    ready, silent = (
        ray.wait(list(elsewhere), num_returns=len(elsewhere), timeout=_LOOK_SECONDS)
        if elsewhere
        else ([], [])
    )
    for reference in ready:
        try:
            states[elsewhere[reference]] = ray.get(reference)
        except RayError as error:
            states[elsewhere[reference]] = ProcessState(f"could not be inspected ({type(error).__name__})")
    return states | {
        elsewhere[reference]: ProcessState("lies on a node that does not answer") for reference in silent
    }


def end_process(process: WatchedProcess) -> None:
    """Kill a process on its node; does nothing when it has not started or its node is gone."""
    identity = identity_of(process)
    if identity is None:
        return
    if _is_here(identity):
        kill(identity)
        return
    with suppress(RayError):
        ray.get(_on_node(kill, identity), timeout=_LOOK_SECONDS)


def identity_of(process: WatchedProcess) -> ProcessIdentity | None:
    """The identity of a process; None when it has not started."""
    try:
        identity: ProcessIdentity = ray.get(process.identity, timeout=_IDENTITY_SECONDS)
    except RayError:
        return None
    return identity


def _is_here(identity: ProcessIdentity) -> bool:
    here: str = ray.get_runtime_context().get_node_id()
    return identity.node_id == here


def _on_node(function: Any, identity: ProcessIdentity) -> "ray.ObjectRef[Any]":
    strategy = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    reference: ray.ObjectRef[Any] = (
        ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(identity)
    )
    return reference


def _last_answer(process: WatchedProcess) -> str:
    if process.last_answer is None:
        return "none, it has answered no call yet"
    task, when = process.last_answer
    return f"answered {task} {time.monotonic() - when:.0f} s ago"
