"""Processes that may hang or die: their errors, and a child process on this machine, without Ray.

Imports nothing heavy: processes need it before their environment is complete.
"""

import atexit
import ctypes
import gc
import importlib
import math
import os
import reprlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from verl_rc.runtime.distributed.messages import GarbledError, receive, send
from verl_rc.runtime.distributed.supervisor import PR_SET_PDEATHSIG, supervised

_PACKAGE_ROOT = Path(__file__).absolute().parents[2]
# Not -m: what it sends must not be of a module __main__. The working directory, which -c puts first in the
# path as an empty name, may hold another copy of the package.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from verl_rc.runtime.distributed.child_process import main; main()"
)
_EXIT_SECONDS = 5.0
_KILL_SECONDS = 10.0
"""Time in which a supervisor kills a process and all that it has started."""


class RemoteError(RuntimeError):
    """Another process failed; the message ends with its traceback."""

    def __init__(self, message: str, cause: BaseException | None = None) -> None:
        """``cause``: the exception raised in the process; None when the process died, or is a
        ``ChildProcess``."""
        super().__init__(message)
        self.cause = cause


class ProcessLostError(RemoteError):
    """Another process died."""


class HangError(ProcessLostError):
    """Processes did not answer in time."""


class ChildProcess:
    """An object in a new Python process of this machine, called through a pipe.

    The process and all that it has started can be killed at any moment, and end with the thread that started
    it. It is not forked: a fork would inherit locks that Ray's threads hold.
    """

    def __init__(
        self,
        target: str,
        environment: Mapping[str, str | None],
        wait: bool = True,
        timeout_seconds: float = math.inf,
        **arguments: Any,
    ) -> None:
        """Construct ``module:callable`` in the process; ``environment`` is added to the current one, without
        what is None in it.

        With ``wait=False`` the first ``answer``, due within ``timeout_seconds``, reports the construction.
        """
        self.connection, theirs = Pipe()
        variables = {**os.environ, **environment, "PYTHONPATH": python_path()}
        self._process = subprocess.Popen(
            supervised([sys.executable, "-c", _PROGRAM, str(theirs.fileno())]),
            pass_fds=[theirs.fileno()],
            env={name: value for name, value in variables.items() if value is not None},
            start_new_session=True,  # keys of a terminal do not reach it
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        # With the same key the two processes can share the memory of tensors.
        self._send((bytes(current_process().authkey), sys.path))
        self._send((target, arguments), timeout_seconds)
        if wait:
            self.answer()

    @property
    def pid(self) -> int:
        """Number of its supervisor, whose first child it is."""
        return self._process.pid

    def call(self, method: str, *arguments: Any, timeout_seconds: float = math.inf) -> Any:
        """Call a method of the object and wait for its result."""
        self.ask(method, *arguments, timeout_seconds=timeout_seconds)
        return self.answer()

    def ask(self, method: str, *arguments: Any, timeout_seconds: float = math.inf) -> None:
        """Call a method of the object; ``answer`` returns its result, due within ``timeout_seconds``."""
        self._send((method, arguments), timeout_seconds)

    def _send(self, message: object, timeout_seconds: float = math.inf) -> None:
        self._timeout_seconds = timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        """Deadline of the answer, in seconds of ``time.monotonic``."""
        with suppress(OSError):  # the process has died, or is late (TimeoutError): ``answer`` raises
            send(self.connection, message, self.deadline)

    def answer(self) -> Any:
        """Wait for the result of the oldest pending call.

        Raises ``RemoteError`` with the traceback when the call failed, ``ProcessLostError`` with the reason
        when the process ended or wrote something else, and ``HangError`` at the deadline. After the last two
        the process must be killed.
        """
        try:
            message = receive(self.connection, self.deadline)
        except TimeoutError:
            raise HangError(f"it took longer than {self._timeout_seconds:g} s") from None
        except GarbledError as error:
            raise ProcessLostError(f"its process wrote into its connection: {error}") from None
        except (EOFError, OSError):
            raise ProcessLostError(self._exit_reason()) from None
        match message:
            case (result, None):
                return result
            case (None, str(failure)):
                raise RemoteError(failure)
        raise ProcessLostError(f"its process wrote into its connection: {reprlib.repr(message)}")

    def end(self, seconds: float = 20.0) -> None:
        """End the process in an orderly way; kill it when it does not end in time."""
        self.connection.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all that it has started."""
        self._process.terminate()
        try:
            self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:  # something is there that cannot be killed
            self._process.kill()
            self._process.wait()
        self.connection.close()

    def _exit_reason(self) -> str:
        """The way in which the process ended, as text, after it closed its connection."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def python_path() -> str:
    """``PYTHONPATH`` with the folder of this package first, so that other processes import the same code."""
    return os.pathsep.join(part for part in (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")) if part)


@contextmanager
def importing() -> Iterator[None]:
    """A context to import large libraries without garbage collection, now or later, of their objects.

    vLLM's import makes some 700,000 objects that stay until the end; collections would take a fifth of its
    time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise Triton's bindings report their objects as leaked


def construct(target: str, arguments: Mapping[str, Any]) -> Any:
    """Import ``module:callable`` and call it."""
    module, name = target.split(":")
    with importing():
        imported = importlib.import_module(module)
    return getattr(imported, name)(**arguments)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the process that started it, ``parent``, dies.

    For the kernel the parent is the thread that started this process: that thread must live on. The signal is
    SIGKILL, because a process that waits in a collective runs no Python signal handler.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The child: construct the object, then answer calls until the other end closes."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # processes that the object starts must not keep it open
    with Connection(descriptor) as pipe, suppress(EOFError, ConnectionError):
        current_process().authkey, sys.path[:] = pipe.recv()
        served = _answer(pipe, construct, *pipe.recv(), keep=True)
        while True:
            method, arguments = pipe.recv()
            _answer(pipe, lambda name, values: getattr(served, name)(*values), method, arguments)
    # As multiprocessing ends its children: the interpreter takes 2 s to tear down vLLM's modules.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(0)


def _answer(pipe: Connection, work: Callable[..., Any], *arguments: Any, keep: bool = False) -> Any:
    try:
        result = work(*arguments)
    except Exception:  # noqa: BLE001  (the caller raises it)
        pipe.send((None, traceback.format_exc()))
        return None
    pipe.send((None if keep else result, None))
    return result
