"""Remote processes and their errors: one actor class for every role, and waits that name the process that
failed."""

import importlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from verl_rc.metrics.trace import TRACE
from verl_rc.records.batches import Timed
from verl_rc.runtime.distributed.child_process import (
    HangError,
    ProcessLostError,
    RemoteError,
    construct,
    importing,
)
from verl_rc.trainer.cluster.watchdog import (
    WATCHDOG,
    ProcessIdentity,
    end_process,
    identity_of,
    register_stack_dump,
)

_Answer = tuple[Any, float, float]
"""A result, when its computation began (seconds since 1970 by the host's clock), and the seconds it took."""


@ray.remote
class _Process:
    """A Ray actor that hosts one object. Its environment is set before the object's module imports torch or
    vllm.

    Ray pickles the class by value. A function of this module that a method named would be pickled by
    reference: the actor would import this module, and with it torch, before its number of threads is set.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        if (
            "VLLM_HOST_IP" not in environment
        ):  # otherwise all processes are on one node, and use its loopback interface
            self._use_network_of_node()
        os.environ.update(environment)
        self._identity = register_stack_dump(ray.get_runtime_context().get_node_id())
        self._object: Any = None

    def _use_network_of_node(self) -> None:
        """Connect as Ray does; variables that are set on the node take precedence."""
        from verl_rc.runtime.distributed.network import network_variables  # noqa: PLC0415  (see the class)

        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "VLLM_HOST_IP")
        if not all(name in os.environ for name in names):
            for name, value in network_variables(ray.util.get_node_ip_address()).items():
                os.environ.setdefault(name, value)

    def identity(self) -> ProcessIdentity:
        return self._identity

    def run(self, method: str, *arguments: Any) -> _Answer:
        """Call one of the methods below, named without its underscore, and time it."""
        begin = time.time()
        started = time.perf_counter()
        result = getattr(self, f"_{method}")(*arguments)
        return result, begin, time.perf_counter() - started

    def _prepare(self, target: str) -> None:
        with importing():
            importlib.import_module(target.split(":")[0])

    def _build(self, target: str, arguments: Mapping[str, Any]) -> int:
        try:
            self._object = construct(target, arguments)
        except BaseException as error:
            # Libraries write the reason there, also from their threads and child processes, and Ray does not
            # show it.
            log = os.path.realpath("/proc/self/fd/2")
            if os.path.isfile(log):
                with open(log, encoding="utf-8", errors="replace") as file:
                    lines = file.read().splitlines()[-20:]
                error.add_note("\n".join([f"The last lines of {log}:", *lines]))
            raise
        return os.getpid()

    def _call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._object, method)(*arguments)

    def _visible_devices(self) -> str:
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids())

    def _gpu_bytes(self) -> int:
        import torch  # noqa: PLC0415  (once its environment is set)

        from verl_rc.runtime.distributed.process_group import trainer_device  # noqa: PLC0415  (as above)

        return int(torch.cuda.get_device_properties(trainer_device("cuda")).total_memory)

    def _listen(self, host: str | None) -> tuple[str, int]:
        from verl_rc.runtime.distributed.network import listen  # noqa: PLC0415  (see the class)

        host = host or ray.util.get_node_ip_address()
        return host, listen(host)


class RemoteProcess:
    """A handle of one process of the cluster, with its name for messages."""

    def __init__(self, name: str, environment: Mapping[str, str], **options: Any) -> None:
        """Start the process; ``options`` are Ray's (resources, placement)."""
        self.name = name
        self.last_answer: tuple[str, float] | None = None
        """The last answered call and its ``time.monotonic`` in seconds; None before the first answer."""
        self._environment = dict(environment)
        self._options = options
        self._start()
        WATCHDOG.add(self)

    def _start(self) -> None:
        self._actor = _Process.options(**self._options).remote(self._environment)  # type: ignore[attr-defined]
        self.identity = self._actor.identity.remote()

    def prepare(self, target: str) -> "Pending":
        """Import the module of ``module:Class`` in the process, for a later ``build``."""
        return Pending(self, f"import {target.split(':')[0]}", self._actor.run.remote("prepare", target))

    def build(self, target: str, **arguments: Any) -> "Pending":
        """Construct ``module:Class`` in the process."""
        reference = self._actor.run.remote("build", target, arguments)
        return Pending(self, f"start {target.split(':')[1]}", reference)

    def call(
        self, method: str, *arguments: Any, task: str | None = None, name: str | None = None
    ) -> "Pending":
        """Call a method of the process's object; of what is ``shared`` it gets the value.

        ``task``: the call in messages, default the method's name; ``name``: the part of the process that
        answers, default the process.
        """
        return Pending(self, task or method, self._actor.run.remote("call", method, *arguments), name)

    def listen(self, host: str | None = None) -> "Pending":
        """Bind a port for a server of the process; the answer is ``host`` (default: the address of its node)
        and the port."""
        return Pending(self, "listen on a port", self._actor.run.remote("listen", host))

    def visible_devices(self) -> "Pending":
        """The GPUs that Ray assigned to the process, in terms of ``CUDA_VISIBLE_DEVICES``."""
        return Pending(self, "name its GPUs", self._actor.run.remote("visible_devices"))

    def gpu_bytes(self) -> "Pending":
        """Memory of the process's first GPU."""
        return Pending(self, "measure its GPU", self._actor.run.remote("gpu_bytes"))

    def node_is_gone(self) -> bool:
        """Whether the process's node has left the cluster."""
        identity = identity_of(self)
        return identity is not None and not any(
            node["Alive"] for node in ray.nodes() if node["NodeID"] == identity.node_id
        )

    def kill(self) -> None:
        """Kill the process, also a stopped or dead one."""
        end_process(self)  # Ray would ask it first, and one that is stopped does not hear
        ray.kill(self._actor)

    def replace(self) -> None:
        """Kill the process and start an empty one with the same name and environment."""
        self.kill()
        self._start()


class Pending:
    """A call whose result is pending."""

    def __init__(
        self, process: RemoteProcess, task: str, reference: "ray.ObjectRef[Any]", name: str | None = None
    ) -> None:
        """``name``: the part of the process that answers, default the process."""
        self.process = process
        self.name = name or process.name
        self.task = task
        self.reference = reference
        self.sent_at = time.time()
        """Seconds since 1970."""
        self.busy_seconds = 0.0
        """Seconds that the process computed, known once it has answered; the rest of the wait was transport.
        """

    @property
    def task_of_process(self) -> str:
        """The task, with the part of the process that does it."""
        return self.task if self.name == self.process.name else f"{self.name}: {self.task}"


def shared(argument: Any) -> Any:
    """The argument of calls to several processes, pickled once."""
    return ray.put(argument)


_SERVE_SECONDS = 0.25
"""Seconds between two calls of ``WhileWaiting``."""

WhileWaiting = Callable[[], None]
"""Short work that the driver repeats while it waits for ranks that compute; its exceptions end the wait."""
work_beside: ContextVar[WhileWaiting | None] = ContextVar("work beside ranks", default=None)
"""The work of ``while_ranks_compute``."""


@contextmanager
def while_ranks_compute(work: WhileWaiting) -> Iterator[None]:
    """Within this block the driver repeats ``work`` while it waits for ranks (``wait_timed``)."""
    token = work_beside.set(work)
    try:
        yield
    finally:
        work_beside.reset(token)


def wait_for_all(
    pending: Sequence[Pending],
    timeout_seconds: float | None = None,
    while_waiting: WhileWaiting | None = None,
) -> list[Any]:
    """Wait for all results, in the given order; fails as soon as one call fails.

    Raises ``RemoteError`` with the process, its call and its traceback; ``HangError`` with the processes that
    did not answer within ``timeout_seconds`` (None: ``trainer.hang_timeout_seconds``) and the state of each.
    """
    limit, key = timeout_seconds, "trainer.ready_timeout_seconds"
    if timeout_seconds is None:
        limit, key = WATCHDOG.limit_seconds, "trainer.hang_timeout_seconds"
    results = {}
    for call, result in as_completed(pending, limit, key, while_waiting=while_waiting):
        if isinstance(result, RemoteError):
            raise result
        results[call.reference] = result
    return [results[call.reference] for call in pending]


def wait_timed(pending: Sequence[Pending]) -> Timed[list[Any]]:
    """The results of ``wait_for_all``, and the seconds that the slowest of the processes computed; meanwhile
    the driver does the work of ``while_ranks_compute``."""
    results = wait_for_all(pending, while_waiting=work_beside.get())
    return Timed(results, max((call.busy_seconds for call in pending), default=0.0))


def first_answered(pending: Sequence[Pending], wait_seconds: float) -> list[Pending]:
    """The calls that have been answered; waits at most ``wait_seconds`` for the first of them."""
    calls = {call.reference: call for call in pending}
    return [calls[reference] for reference in _ended(list(calls), wait_seconds)[0]]


def _ended(references: list[Any], timeout: float | None) -> tuple[list[Any], list[Any]]:
    """All that have ended, once one has, and the others. A look takes time for each reference, so that one
    look for each would take time for their square."""
    ended, others = ray.wait(references, num_returns=1, timeout=timeout)
    if not ended or not others:
        return ended, others
    further, others = ray.wait(others, num_returns=len(others), timeout=0)
    return [*ended, *further], others


def as_completed(
    pending: Sequence[Pending],
    timeout_seconds: float | None,
    limit_key: str,
    grace_seconds: float = math.inf,
    while_waiting: WhileWaiting | None = None,
) -> Iterator[tuple[Pending, Any | RemoteError]]:
    """Yield every call with its result or ``RemoteError``, in order of completion.

    Calls without an answer after ``timeout_seconds`` (None: no limit), the value of the configuration's
    ``limit_key``, come last, each with a ``HangError``. Once a call failed in a live process, the others have
    ``grace_seconds``, because processes that communicate fail together.
    """
    calls = {call.reference: call for call in pending}
    full_deadline = deadline = time.monotonic() + (math.inf if timeout_seconds is None else timeout_seconds)
    remaining = list(calls)
    while remaining:
        seconds_left = max(0.0, deadline - time.monotonic())
        pause = seconds_left if while_waiting is None else min(_SERVE_SECONDS, seconds_left)
        ready, remaining = _ended(remaining, pause if math.isfinite(pause) else None)
        if not ready and while_waiting is not None and seconds_left:
            while_waiting()
            continue
        if not ready:
            break
        for call in (calls[reference] for reference in ready):
            try:
                result = _result_of(call)
            except RemoteError as error:
                result = error
                if not isinstance(error, ProcessLostError):
                    deadline = min(deadline, time.monotonic() + grace_seconds)
            yield call, result
    if not remaining:
        return
    if deadline < full_deadline:
        reason = f"no answer within {grace_seconds:g} s after another process failed"
    else:
        reason = WATCHDOG.report(
            [(call.process, call.task_of_process) for call in pending],
            [calls[reference].process for reference in remaining],
            timeout_seconds or 0.0,
            limit_key,
        )
    for reference in remaining:
        yield calls[reference], HangError(reason)


def _result_of(call: Pending) -> Any:
    try:
        result, begin, call.busy_seconds = ray.get(call.reference)
        call.process.last_answer = (call.task_of_process, time.monotonic())
        times = (call.sent_at, time.time())
        TRACE.span(call.name, call.task, begin, begin + call.busy_seconds, call=times)
        return result
    except RayTaskError as error:
        call.process.last_answer = (call.task_of_process, time.monotonic())
        # Ray raises a generated class that inherits from the cause's; it has only the text and the cause.
        raise RemoteError(f"{call.name} failed to {call.task}:\n{str(error).strip()}", error.cause) from None
    except RayError as error:
        process = "" if call.name == call.process.name else f" (the process of {call.process.name})"
        raise ProcessLostError(f"{call.name} died while it was to {call.task}{process}: {error}") from None
