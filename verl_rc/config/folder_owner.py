"""The owner of a folder: the one process, on any host that shares the folder, that may write there.

The owner's name is in ``owner.json``, made with the first write and removed at the end. Its time of
modification, renewed every ``HEARTBEAT_SECONDS`` and always given by the file system, is the sign of life:
clocks of hosts are never compared, nor are pids of another host.
"""

import fcntl
import json
import logging
import math
import os
import socket
import tempfile
import threading
import time
import uuid
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter
from typing_extensions import Self

from verl_rc.config.errors import ConfigError
from verl_rc.config.processes import process_status

OWNER_FILE = "owner.json"
HEARTBEAT_SECONDS = 3.0
SILENT_SECONDS = 120.0
"""Seconds without a sign of life after which an owner on another host counts as gone."""
WATCH_SECONDS = 10.0
"""Seconds for which the file of such an owner must not change first: a clock of the file system may have
jumped."""
_UNWRITTEN_SECONDS = 1.0
"""Time between the creation of the file and its contents."""
_LOG = logging.getLogger("verl_rc")


class FolderTakenError(ConfigError):
    """The folder belongs to another run that lives."""


class FolderLostError(RuntimeError):
    """The folder belonged to this process, and another run has taken it over."""


@dataclass(frozen=True)
class Owner:
    """A process, so that others can tell whether it lives."""

    host: str
    pid: int
    started: int
    """Clock ticks since boot; tells the process from a later one with the same pid."""
    system: str
    """Boot of the kernel and namespace of its pids; empty where neither is known."""
    since: float
    """Time at which it took the folder, by the clock of the file system."""
    token: str
    """Tells the owner from all others."""

    @classmethod
    def here(cls, since: float) -> "Owner":
        """This process."""
        status = process_status(os.getpid())
        started = 0 if status is None else status[1]
        return cls(socket.gethostname(), os.getpid(), started, _system(), since, uuid.uuid4().hex)

    @property
    def is_of_this_system(self) -> bool:
        """Whether pids can be looked up here."""
        return bool(self.system) and (self.system, self.host) == (_system(), socket.gethostname())

    @property
    def runs(self) -> bool:
        """Whether the process, of this system, runs or is stopped."""
        status = process_status(self.pid)
        return status is not None and status[0] not in "ZX" and status[1] == self.started


_OWNER = TypeAdapter(Owner)


@dataclass(frozen=True)
class _Found:
    """What ``owner.json`` held at a moment."""

    content: bytes
    modified: float

    @property
    def owner(self) -> Owner | None:
        """The owner. None where the file is damaged, or its host's disk was full."""
        try:
            return _OWNER.validate_json(self.content)
        except ValueError:
            return None


class FolderClaim:
    """A part of this process that writes to a folder. The process owns the folder while a part claims it."""

    def __init__(self, folder: Path, part: str, key: str = "") -> None:
        """Own ``folder``, which is created where it is missing. ``key`` of the configuration names it.

        Raises ``FolderTakenError`` when another run owns the folder, also one of this process: when this part
        of it claims the folder already.
        """
        self.folder = folder.expanduser().resolve()
        with _LOCK:
            held = _HELD.get(self.folder)
            is_new = held is None
            if held is None:
                held = _HELD[self.folder] = _Held(self.folder, key)
            else:
                held.require()
            if part in held.parts:
                raise FolderTakenError(_taken(self.folder, held.found(), key))
            held.parts.add(part)
        if is_new:
            # Without the lock: a thread that begins may collect garbage, and with it a claim, whose release
            # waits for the lock.
            held.renewal.start()
        self._held = held
        self._release = weakref.finalize(self, _release, held, part, os.getpid())

    def require(self) -> None:
        """Raise ``FolderLostError`` when another run owns the folder now; call it before a write."""
        self._held.require()

    def release(self) -> None:
        """Give the folder up, unless another part of this process claims it."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def living_owner(folder: Path) -> str | None:
    """The sentence that refuses a run in ``folder`` because another one lives there. None if none does."""
    path = folder.expanduser() / OWNER_FILE
    found = _read(path)
    return None if found is None or _seconds_to_watch(path, found) < math.inf else _taken(folder, found)


class _Held:
    """A folder of this process."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / OWNER_FILE
        self.parts: set[str] = set()
        try:
            self._content = _take(self.path, key)
        except OSError as error:
            raise ConfigError(
                f"{key or 'the folder of a run'} must be a folder that can be written to, got {folder} "
                f"({error.strerror or error}). Pass another one."
            ) from error
        self._ended = threading.Event()
        self.renewal = threading.Thread(target=self._renew, name=f"owner of {folder}", daemon=True)

    def found(self) -> _Found:
        return _read(self.path) or _Found(self._content, 0.0)

    def require(self) -> None:
        if (found := _read(self.path)) is None:  # the user has removed it, or the whole folder
            _create(self.path, self._content)
            found = self.found()
        if found.content != self._content:
            raise FolderLostError(
                f"{self.path.parent} must stay with this run, but {_named(found.owner)} has taken it over: "
                f"this process had given no sign of life for {SILENT_SECONDS:.0f} s (was it stopped?), "
                "or its owner.json was removed. It writes nothing more; the other run goes on."
            )

    def end(self) -> None:
        self._ended.set()
        with suppress(OSError):
            if self.found().content == self._content:
                self.path.unlink()

    def _renew(self) -> None:
        while not self._ended.wait(HEARTBEAT_SECONDS):
            with suppress(OSError):  # of a disk that is gone for a while
                if self.found().content == self._content:
                    os.utime(self.path)


_HELD: dict[Path, _Held] = {}
_LOCK = threading.RLock()


def _release(held: _Held, part: str, pid: int) -> None:
    if pid != os.getpid():  # a child that was forked owns nothing
        return
    with _LOCK:
        held.parts.discard(part)
        if not held.parts and _HELD.get(held.path.parent) is held:
            del _HELD[held.path.parent]
            held.end()


def _take(path: Path, key: str) -> bytes:
    """Make this process the owner; returns the content of the file. Raises ``FolderTakenError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        content = json.dumps(asdict(Owner.here(_file_time(path.parent)))).encode() + b"\n"
        if _create(path, content):
            return content
        found = _read(path)
        if found is None:
            continue
        seconds = _seconds_to_watch(path, found)
        if seconds == math.inf or not _stays(path, found, seconds):
            raise FolderTakenError(_taken(path.parent, _read(path) or found, key))
        if _take_over(path, found, content):
            return content


def _create(path: Path, content: bytes) -> bool:
    """Create the file, on the disk for sure; False where it exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        return False
    try:
        os.write(descriptor, content)
        os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return True


def _read(path: Path) -> _Found | None:
    """The file as it is on its server; None where there is none."""
    deadline = time.monotonic() + _UNWRITTEN_SECONDS
    while True:
        try:
            with path.open("rb") as file:  # a shared file system asks its server when a file is opened
                found = _Found(file.read(), os.fstat(file.fileno()).st_mtime)
        except FileNotFoundError:
            return None
        if found.content or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def _seconds_to_watch(path: Path, found: _Found) -> float:
    """Seconds for which the file must not change before its owner counts as gone; infinite for an owner that
    lives."""
    owner = found.owner
    if owner is not None and owner.is_of_this_system:
        return math.inf if owner.runs else 0.0
    age = _file_time(path.parent) - found.modified
    is_of_an_earlier_boot = owner is not None and owner.host == socket.gethostname() and age > _seconds_up()
    if age > SILENT_SECONDS or is_of_an_earlier_boot:
        return WATCH_SECONDS
    # A file of the future: the file system takes times from its hosts, and they differ.
    return SILENT_SECONDS if age < -HEARTBEAT_SECONDS else math.inf


def _stays(path: Path, found: _Found, seconds: float) -> bool:
    """Whether the file does not change for this many seconds; the wait and its end are logged."""
    if seconds:
        _LOG.warning(
            "%s belongs to %s, with no sign of life for %s: watching it for %.0f s before this run takes it",
            path.parent,
            _named(found.owner),
            _told(max(0.0, _file_time(path.parent) - found.modified)),
            seconds,
        )
    deadline = time.monotonic() + seconds
    while (now := _read(path)) is not None:
        if now != found:
            return False
        if time.monotonic() >= deadline:
            _LOG.warning(
                "%s belonged to %s, which is gone: this run goes on there", path.parent, _named(found.owner)
            )
            return True
        time.sleep(min(1.0, seconds))
    return True


def _take_over(path: Path, found: _Found, content: bytes) -> bool:
    """Replace the file of an owner that is gone; False where it is no longer as it was found.

    Of several starts at once the lock lets one look and replace at a time. It ends with the process.
    """
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    mode = "rb+" if os.access(path, os.W_OK) else "rb"  # NFS locks only what is open for writing
    with suppress(FileNotFoundError), path.open(mode) as old:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(old, fcntl.LOCK_EX)
        if _read(path) == found and _create(new, content):
            os.replace(new, path)
            return True
    return False


def _file_time(folder: Path) -> float:
    """The present by the clock of the folder's file system."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.utime(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def _seconds_up() -> float:
    """Seconds since this machine, or this container, was started; infinite where it cannot be told."""
    first = process_status(1)
    if first is None:
        return math.inf
    return time.clock_gettime(time.CLOCK_BOOTTIME) - first[1] / os.sysconf("SC_CLK_TCK")


def _taken(folder: Path, found: _Found, key: str = "") -> str:
    now = _file_time(folder)
    since = "" if found.owner is None else f", which took it {_told(now - found.owner.since)} ago"
    other = "pass another folder" + (f", {key}=<folder>" if key else "")
    return (
        f"a folder must have one run that writes to it, but {folder} belongs to {_named(found.owner)}{since} "
        f"({OWNER_FILE}; last sign of life {_told(now - found.modified)} ago). Let it end, stop it there, or "
        f"{other}. A process that died blocks no start on its own host, and none elsewhere later than "
        f"{SILENT_SECONDS:.0f} s after its last sign of life."
    )


def _named(owner: Owner | None) -> str:
    return "a process that is not named" if owner is None else f"process {owner.pid} on {owner.host}"


def _told(seconds: float) -> str:
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
