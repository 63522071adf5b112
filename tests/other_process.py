"""An object that lives in a freshly started process, called through a pipe; for tests of what processes share."""

import importlib
import os
import traceback
from collections.abc import Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


class OtherProcess:
    """Builds ``module:callable`` in a new interpreter, with its environment set before the module is imported."""

    def __init__(self, target: str, environment: Mapping[str, str], wait: bool = True, **arguments: Any) -> None:
        """``wait=False``: the first ``answer`` is that of building, for objects that wait for each other."""
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, target, dict(environment), arguments), daemon=True)
        self.process.start()
        theirs.close()
        if wait:
            self.answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def ask(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        result, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(error)
        return result

    def end(self) -> None:
        self._pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()


def serve(pipe: Connection, target: str, environment: dict[str, str], arguments: dict[str, Any]) -> None:
    os.environ.update(environment)

    def build() -> Any:
        module, name = target.split(":")
        return getattr(importlib.import_module(module), name)(**arguments)

    try:
        served = _attempt(pipe, build, keep=True)
        while True:
            method, given = pipe.recv()
            _attempt(pipe, lambda: getattr(served, method)(*given))  # noqa: B023
    except EOFError:
        return


def _attempt(pipe: Connection, work: Any, keep: bool = False) -> Any:
    try:
        result = work()
    except Exception:  # noqa: BLE001  (the caller raises it)
        pipe.send((None, traceback.format_exc()))
        return None
    pipe.send((None if keep else result, None))
    return result
