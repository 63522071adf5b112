"""Remote processes and their errors: one actor class for every role, and waiting that names who failed."""

import importlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError


class RemoteError(RuntimeError):
    """A remote process failed; the message ends with its traceback."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        """``cause``: what was raised in the process, where it was raised by code and did not kill the process."""
        super().__init__(message)
        self.cause = cause


@ray.remote
class _Process:
    """Hosts one object. Its environment is set before the object's module, and with it torch or vllm, is imported."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._object: Any = None

    def build(self, target: str, arguments: Mapping[str, Any]) -> tuple[int, float]:
        started = time.perf_counter()
        module, name = target.split(":")
        self._object = getattr(importlib.import_module(module), name)(**arguments)
        return os.getpid(), time.perf_counter() - started

    def call(self, method: str, arguments: Sequence[Any]) -> tuple[Any, float]:
        started = time.perf_counter()
        result = getattr(self._object, method)(*arguments)
        return result, time.perf_counter() - started

    def visible_devices(self) -> tuple[str, float]:
        return ",".join(str(gpu) for gpu in ray.get_gpu_ids()), 0.0

    def address(self) -> tuple[tuple[str, int], float]:
        with socket.socket() as probe:
            probe.bind(("", 0))
            return (ray.util.get_node_ip_address(), int(probe.getsockname()[1])), 0.0


class RemoteProcess:
    """A handle on one process of the cluster, with the name it has in messages."""

    def __init__(self, name: str, environment: Mapping[str, str], **options: Any) -> None:
        """Start the process; ``options`` are Ray's (resources, placement)."""
        self.name = name
        self._actor = _Process.options(**options).remote(dict(environment))  # type: ignore[attr-defined]

    def build(self, target: str, **arguments: Any) -> "Pending":
        """Construct ``module:Class`` in the process."""
        return Pending(self.name, f"start {target.split(':')[1]}", self._actor.build.remote(target, arguments))

    def call(self, method: str, *arguments: Any) -> "Pending":
        """Call a method of the process's object."""
        return Pending(self.name, method, self._actor.call.remote(method, arguments))

    def free_address(self) -> "Pending":
        """Host and a free port of the process's node."""
        return Pending(self.name, "find a free port", self._actor.address.remote())

    def visible_devices(self) -> "Pending":
        """The GPUs Ray gave the process, as ``CUDA_VISIBLE_DEVICES`` names them."""
        return Pending(self.name, "name its GPUs", self._actor.visible_devices.remote())

    def kill(self) -> None:
        """End the process without asking it."""
        ray.kill(self._actor)


class Pending:
    """A result on its way, and whom it comes from."""

    def __init__(self, who: str, what: str, reference: "ray.ObjectRef[Any]") -> None:
        self.who = who
        self.what = what
        self.reference = reference
        self.busy_seconds = 0.0
        """Seconds the process itself worked on it, known once it has answered: the rest of the wait was transport."""


def wait_for_all(pending: Sequence[Pending], timeout_seconds: float | None = None) -> list[Any]:
    """Results in the order given; fails as soon as one of them fails.

    Raises ``RemoteError`` naming the process, what it was doing and, last, its traceback; or naming those that did
    not answer within ``timeout_seconds``.
    """
    waiting = {item.reference: item for item in pending}
    remaining = list(waiting)
    results: dict[Any, Any] = {}
    while remaining:
        ready, remaining = ray.wait(remaining, num_returns=1, timeout=timeout_seconds)
        if not ready:
            names = ", ".join(f"{waiting[reference].who} ({waiting[reference].what})" for reference in remaining)
            raise RemoteError(
                f"these processes did not answer within {timeout_seconds:.0f} s: {names}. "
                f"Free resources of the cluster: {ray.available_resources()}. "
                "Raise trainer.ready_timeout_seconds if they are slow."
            )
        results[ready[0]] = _result_of(waiting[ready[0]])
    return [results[item.reference] for item in pending]


def longest_busy(pending: Sequence[Pending]) -> float:
    """Seconds the slowest of these answered calls was worked on."""
    return max((item.busy_seconds for item in pending), default=0.0)


def _result_of(item: Pending) -> Any:
    try:
        result, item.busy_seconds = ray.get(item.reference)
        return result
    except RayTaskError as error:
        # Ray raises a class of its own that inherits from the cause's; only its text and its cause are there.
        raise RemoteError(f"{item.who} failed to {item.what}:\n{str(error).strip()}", error.cause) from None
    except (RayActorError, GetTimeoutError, RayError) as error:
        raise RemoteError(f"{item.who} died while it was to {item.what}: {error}") from None
