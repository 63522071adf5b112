"""An object that lives in a freshly started process, called through a pipe."""

import ctypes
import importlib
import os
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when its parent ends."""


class OtherProcess:
    """Builds ``module:callable`` in a new interpreter, with its environment set before the module is
    imported.

    It is killed when the process that started it ends.
    """

    def __init__(
        self,
        target: str,
        environment: Mapping[str, str],
        wait: bool = True,
        has_children: bool = False,
        **arguments: Any,
    ) -> None:
        """``wait=False``: the first ``answer`` is that of building, for objects that wait for each other.

        ``has_children``: the object starts processes with multiprocessing, so that this one must be ended
        with ``end``.
        """
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, target, dict(environment), arguments), daemon=not has_children
        )
        self.process.start()
        theirs.close()
        if wait:
            self.answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object and wait for its result."""
        self.ask(method, *arguments)
        return self.answer()

    def ask(self, method: str, *arguments: Any) -> None:
        """Call a method of the object; ``answer`` returns its result."""
        self._pipe.send((method, arguments))

    def answer(self, timeout_seconds: float | None = None) -> Any:
        """The result of the oldest call that was not answered.

        Raises ``RuntimeError`` with the traceback when it failed or the process ended, ``TimeoutError`` when
        it took too long.
        """
        if not self._pipe.poll(timeout_seconds):
            raise TimeoutError
        try:
            result, error = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise RuntimeError(f"the process ended with status {self.process.exitcode}") from None
        if error is not None:
            raise RuntimeError(error)
        return result

    def end(self, seconds: float = 20.0) -> None:
        """End the process; kill it when it does not end in time."""
        self._pipe.close()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def serve(pipe: Connection, target: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    """The other process: builds the object, then answers calls until the pipe is closed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environment)

    def build() -> Any:
        module, name = target.split(":")
        return getattr(importlib.import_module(module), name)(**arguments)

    try:
        served = _attempt(pipe, build, keep=True)
        while True:
            method, given = pipe.recv()
            _attempt(pipe, lambda: getattr(served, method)(*given))  # noqa: B023  (called at once)
    except (EOFError, BrokenPipeError):  # the other end is closed
        return


def _attempt(pipe: Connection, work: Callable[[], Any], keep: bool = False) -> Any:
    try:
        result = work()
    except Exception:  # noqa: BLE001  (the caller raises it)
        pipe.send((None, traceback.format_exc()))
        return None
    pipe.send((None if keep else result, None))
    return result
