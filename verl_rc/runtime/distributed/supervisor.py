"""The parent of a command, which ends all that the command has started: daemons, too, and after a kill, too.

It runs as a file, by a Python without packages: ``supervised`` is the command line.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the thread that started it ends."""
_PR_SET_CHILD_SUBREAPER = 36
"""Linux: descendants of a process become its children when their own parents end."""
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)
_NO_REPORT = -1
_KILL_SECONDS = 5.0
"""Time after which a process that cannot be killed (of another user, or in a dead file system) is left."""


def supervised(command: Sequence[str], seconds: float = 0.0, report: int = _NO_REPORT) -> list[str]:
    """The command line of a supervisor of ``command``, for the process that calls this.

    It ends as the command ends. Other processes that the command has started have ``seconds`` to end, then
    they are killed; their number is written to the file descriptor ``report``. SIGTERM ends all at once, and
    so does the end of the thread that has started the supervisor.
    """
    options = [str(os.getpid()), str(seconds), str(report)]
    return [sys.executable, "-I", "-S", os.path.abspath(__file__), *options, *command]


def main() -> None:
    """Start the command and wait for its end, or for the order to end it."""
    parent, seconds, report = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)
    child = _start(sys.argv[4:], report)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != report:
            with suppress(OSError):  # the one of the list itself
                os.close(descriptor)
    status = _wait(child)
    if status is not None:
        _wait_for_others(time.monotonic() + seconds)
    count = _kill_all(time.monotonic() + _KILL_SECONDS)
    if report != _NO_REPORT:
        with suppress(OSError):
            os.write(report, str(count).encode())
    _end_like(status)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _start(command: list[str], report: int) -> int:
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()  # a signal to its own group does not end the supervisor
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        if report != _NO_REPORT:
            os.close(report)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:
            os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    os._exit(127)


def _ended() -> Iterator[tuple[int, int]]:
    """Number and status of each child that has ended. Raises ``ChildProcessError`` when no other is left."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        yield pid, status


def _wait(child: int) -> int | None:
    """Exit status of the command. None if the order to end came before."""
    while signal.sigwait(_AWAITED) != signal.SIGTERM:
        for pid, status in _ended():
            if pid == child:
                return status
    return None


def _wait_for_others(deadline: float) -> None:
    """Wait until no process is left, the order to end comes, or the deadline."""
    with suppress(ChildProcessError):
        while True:
            list(_ended())
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            told = signal.sigtimedwait(_AWAITED, remaining)
            if told is not None and told.si_signo == signal.SIGTERM:
                return


def _kill_all(deadline: float) -> int:
    """Kill the children, and what become children by that, until none is left; returns their number."""
    killed: set[int] = set()
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            list(_ended())
            for child in _children():
                with suppress(OSError):
                    os.kill(child, signal.SIGKILL)
                    killed.add(child)
            signal.sigtimedwait(_AWAITED, 0.05)
    return len(killed)


def _children() -> list[int]:
    try:
        with open("/proc/thread-self/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == os.getpid()
        ]


def _parent(pid: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def _end_like(status: int | None) -> None:
    if status is None:
        os._exit(1)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [os.WTERMSIG(status)])
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


if __name__ == "__main__":
    main()
