"""No wait for ever: how long the driver waits for its processes, what is written down when that is over, and ending them all."""

import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_rc.cluster.hang_report import (
    AwaitedProcess,
    ProcessIdentity,
    ProcessState,
    TimedOutWait,
    full_report,
    inspect_process,
    kill,
    summary,
)

_LOOK_SECONDS = 30.0
"""How long looking into the processes of other nodes may take."""
_IDENTITY_SECONDS = 1.0


class WatchedProcess(Protocol):
    """A process as the watchdog sees it."""

    name: str
    identity: "ray.ObjectRef[Any]"
    """On its way since the process was started: a process that hangs could not give it."""
    last_answer: tuple[str, float] | None
    """What it answered last, and when, in seconds of ``time.monotonic``; None: nothing yet."""


class Watchdog:
    """Limits every wait for remote processes, looks into those that are silent, and can end all of them."""

    def __init__(self) -> None:
        self._processes: WeakSet[Any] = WeakSet()
        self.limit_seconds: float | None = None
        """Longest wait that has no limit of its own; None: for ever."""
        self._folder: Path | None = None

    @contextmanager
    def watching(self, limit_seconds: float, folder: Path) -> Iterator[None]:
        """Inside, waits end after ``limit_seconds`` and reports are written to ``folder``.

        An error inside kills all processes: one that hangs would not hear it when it is asked to end.
        """
        self.limit_seconds, self._folder = limit_seconds, folder
        try:
            yield
        except SystemExit:  # somebody asked the run to end, and nothing is wrong with it
            raise
        except BaseException:
            self.end_all()
            raise
        finally:
            self.limit_seconds, self._folder = None, None

    def add(self, process: WatchedProcess) -> None:
        """Watch a process as long as somebody holds it."""
        self._processes.add(process)

    def forget_all(self) -> None:
        """Watch none of those known so far: a new Ray session begins, and it cannot be asked for processes of an earlier one."""
        self._processes.clear()

    def report(
        self, calls: Sequence[tuple[WatchedProcess, str]], silent: Sequence[WatchedProcess], seconds: float, limit_key: str
    ) -> str:
        """Inspect the ``silent`` processes among those of ``calls``, write the report file and return its summary."""
        states = inspect_processes(silent)
        wait = TimedOutWait(
            seconds,
            limit_key,
            [AwaitedProcess(process.name, what, _last_answer(process), states.get(id(process))) for process, what in calls],
            "".join(traceback.format_stack()[:-2]),
            str(ray.available_resources()),
        )
        if self._folder is None:
            return summary(wait)
        path = self._folder / f"hang-{datetime.now(UTC):%Y%m%dT%H%M%S}.txt"
        path.write_text(full_report(wait), encoding="utf-8")
        return f"{summary(wait)}\nTheir Python stacks are in {path}."

    def end_all(self) -> None:
        """Kill every process that is left, on whatever node, also one that is stopped."""
        for process in list(self._processes):
            end_process(process)


WATCHDOG = Watchdog()
"""That of this driver."""


def inspect_processes(processes: Sequence[WatchedProcess]) -> dict[int, ProcessState]:
    """What can be seen of each process from its node, by ``id`` of the process."""
    states, elsewhere = {}, {}
    for process in processes:
        identity = identity_of(process)
        if identity is None:
            states[id(process)] = ProcessState("has not started")
        elif _is_here(identity):
            states[id(process)] = inspect_process(identity)
        else:
            elsewhere[_on_node(inspect_process, identity)] = id(process)
    ready, missing = ray.wait(list(elsewhere), num_returns=len(elsewhere), timeout=_LOOK_SECONDS) if elsewhere else ([], [])
    for reference in ready:
        try:
            states[elsewhere[reference]] = ray.get(reference)
        except RayError as error:
            states[elsewhere[reference]] = ProcessState(f"could not be inspected ({type(error).__name__})")
    return states | {elsewhere[reference]: ProcessState("lies on a node that does not answer") for reference in missing}


def end_process(process: WatchedProcess) -> None:
    """Kill a process where it is; does nothing when it has not started, or its node is gone."""
    identity = identity_of(process)
    if identity is None:
        return
    if _is_here(identity):
        kill(identity)
        return
    with suppress(RayError):
        ray.get(_on_node(kill, identity), timeout=_LOOK_SECONDS)


def identity_of(process: WatchedProcess) -> ProcessIdentity | None:
    """Where a process is; None when it has not started."""
    try:
        identity: ProcessIdentity = ray.get(process.identity, timeout=_IDENTITY_SECONDS)
    except RayError:
        return None
    return identity


def _is_here(identity: ProcessIdentity) -> bool:
    return identity.node_id == ray.get_runtime_context().get_node_id()


def _on_node(function: Any, identity: ProcessIdentity) -> "ray.ObjectRef[Any]":
    strategy = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
    reference: ray.ObjectRef[Any] = (
        ray.remote(function).options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(identity)
    )
    return reference


def _last_answer(process: WatchedProcess) -> str:
    if process.last_answer is None:
        return "none, it has answered no call yet"
    what, when = process.last_answer
    return f"answered {what} {time.monotonic() - when:.0f} s ago"
