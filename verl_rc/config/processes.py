"""Facts about processes, from the kernel and the locale."""

import codecs
import locale
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from verl_rc.config.errors import ConfigError


def require_utf8() -> None:
    """Raise ``ConfigError`` unless this process reads text of files and of the terminal as UTF-8."""
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":
        raise ConfigError(
            f"text must be read and written as UTF-8, but the locale says {encoding}. Put PYTHONUTF8=1 "
            "before the command, or set LC_ALL=C.UTF-8."
        )


def process_status(pid: int) -> tuple[str, int] | None:
    """State letter and start time, in clock ticks since boot, of a process; None when there is none."""
    fields = _fields(str(pid))
    return None if fields is None else (fields[0], int(fields[19]))


def kill_descendants() -> None:
    """End the running descendants of this process, except those whose parent had ended."""
    _kill_all(lambda: _descendants(os.getpid()))


def in_session(leader: int, mark: str) -> Iterator[int]:
    """Every process of the session that ``leader`` began, and every one that has left it and still has
    ``mark`` in the environment that it was started with."""
    for path in Path("/proc").glob("[0-9]*"):
        fields = _fields(path.name)
        if fields is None or fields[0] in "ZX" or path.name == str(os.getpid()):
            continue
        with suppress(OSError):  # of another user, or gone
            if int(fields[3]) == leader or os.fsencode(mark) in (path / "environ").read_bytes():
                yield int(path.name)


def kill_session(leader: int, mark: str) -> None:
    """End every process that ``in_session`` finds; without ``/proc`` those of the leader's group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    _kill_all(lambda: in_session(leader, mark))


def _kill_all(find: Callable[[], Iterable[int]]) -> None:
    """End all processes that ``find`` finds; it is asked until it finds no other."""
    stopped: set[int] = set()
    while running := set(find()) - stopped:  # one that is not stopped may start others
        _send(running, signal.SIGSTOP)
        stopped |= running
    _send(stopped, signal.SIGKILL)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    """Running descendants of a process."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        fields = _fields(path.name)
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(path.name))
    found = [pid]
    for parent in found:
        found += children.get(parent, [])
    return found[1:]


def _fields(pid: str) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the state letter on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()  # the name before it may hold anything
