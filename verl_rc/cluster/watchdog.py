"""The watchdog: time limits of the driver's waits, reports about processes that do not answer, and killing all processes."""

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
        """Limit of waits without one of their own; None: unlimited."""
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
        """Kill every remaining process on every node, also stopped ones."""
        for process in list(self._processes):
            end_process(process)


WATCHDOG = Watchdog()
"""That of this driver."""


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
    ready, missing = ray.wait(list(elsewhere), num_returns=len(elsewhere), timeout=_LOOK_SECONDS) if elsewhere else ([], [])
    for reference in ready:
        try:
            states[elsewhere[reference]] = ray.get(reference)
        except RayError as error:
            states[elsewhere[reference]] = ProcessState(f"could not be inspected ({type(error).__name__})")
    return states | {elsewhere[reference]: ProcessState("lies on a node that does not answer") for reference in missing}


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
