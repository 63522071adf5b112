"""A folder has one owner: of two starts one wins, a living owner is left alone, a dead one blocks nothing."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from verl_rc.config import folder_owner
from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import (
    OWNER_FILE,
    FolderClaim,
    FolderLostError,
    FolderTakenError,
    Owner,
    living_owner,
)

LONG_AGO = 10_000.0
"""Seconds; longer than any limit."""


def put_owner(folder: Path, age: float = 0.0, **changes: object) -> bytes:
    """Leave the file of another process, with its last sign of life ``age`` seconds ago."""
    owner = replace(Owner.here(time.time() - age), token="another", **changes)  # type: ignore[arg-type]
    content = json.dumps(asdict(owner)).encode()
    put_content(folder, content, age)
    return content


def put_content(folder: Path, content: bytes, age: float = 0.0) -> None:
    folder.mkdir(exist_ok=True)
    (folder / OWNER_FILE).write_bytes(content)
    os.utime(folder / OWNER_FILE, (time.time() - age,) * 2)


ELSEWHERE = {"host": "node7", "system": "another boot, another namespace", "pid": 4321}


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that only waiting moves; what was waited for."""
    waited: list[float] = []
    monkeypatch.setattr(folder_owner.time, "sleep", waited.append)
    monkeypatch.setattr(folder_owner.time, "monotonic", lambda: sum(waited))
    return waited


@contextmanager
def in_a_child(function: Callable[[], object]) -> Iterator[int]:
    """A forked process that calls ``function`` and then waits; it has called it when the context begins."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os.write(write, b"1")
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    try:
        assert os.read(read, 1) == b"1"
        yield pid
    finally:
        os.close(read)
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_a_second_process_is_told_who_owns_the_folder(tmp_path: Path, waits: list[float]) -> None:
    kept: list[FolderClaim] = []
    with in_a_child(lambda: kept.append(FolderClaim(tmp_path / "run", "run"))) as pid:
        with pytest.raises(FolderTakenError) as caught:
            FolderClaim(tmp_path / "run", "run", "trainer.default_local_dir")
        assert isinstance(caught.value, ConfigError)  # exit status 2
        said = str(caught.value)
        assert f"process {pid} on {socket.gethostname()}, which took it" in said
        assert re.search(r"last sign of life \d+ s ago", said)
        assert "trainer.default_local_dir=<folder>" in said
        assert living_owner(tmp_path / "run") is not None
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert (tmp_path / "run" / OWNER_FILE).exists()
        assert living_owner(tmp_path / "run") is None
        FolderClaim(tmp_path / "run", "run").release()
    assert waits == []  # neither start watched the file


def test_a_process_that_has_ended_but_was_not_reaped_is_dead(tmp_path: Path, waits: list[float]) -> None:
    kept: list[FolderClaim] = []
    with in_a_child(lambda: kept.append(FolderClaim(tmp_path, "run"))) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        FolderClaim(tmp_path, "run").release()
    assert waits == []


def test_a_stopped_process_keeps_its_folder_on_its_host_however_long(tmp_path: Path) -> None:
    kept: list[FolderClaim] = []
    with in_a_child(lambda: kept.append(FolderClaim(tmp_path, "run"))) as pid:
        os.kill(pid, signal.SIGSTOP)
        os.utime(tmp_path / OWNER_FILE, (time.time() - LONG_AGO,) * 2)
        with pytest.raises(FolderTakenError, match="last sign of life 3 h ago"):
            FolderClaim(tmp_path, "run")


def test_a_later_process_with_the_same_pid_owns_nothing(tmp_path: Path, waits: list[float]) -> None:
    put_owner(tmp_path, pid=os.getppid(), started=1)
    FolderClaim(tmp_path, "run").release()
    assert waits == []


@pytest.mark.parametrize(
    "before",
    [
        "a dead owner",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("nothing", "a silent owner elsewhere", "a damaged file")
        ),
    ],
)
def test_of_starts_at_once_one_wins(tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_owner, "WATCH_SECONDS", 0.01)
    num_starts = 5
    for attempt in range(25):
        folder = tmp_path / str(attempt)
        if before == "a dead owner":
            put_owner(folder, started=1)
        elif before == "a silent owner elsewhere":
            put_owner(folder, LONG_AGO, **ELSEWHERE)
        elif before == "a damaged file":
            put_content(folder, b"{", LONG_AGO)
        go, told, pids = os.pipe(), os.pipe(), []
        for _ in range(num_starts):
            pids.append(os.fork())
            if pids[-1] == 0:
                os.close(go[1])
                os.read(go[0], 1)  # ends when the parent closes its side
                try:
                    claim = FolderClaim(folder, "run")
                    claim.require()
                    os.write(told[1], b"w")
                except FolderTakenError:
                    os.write(told[1], b"-")
                except BaseException:  # noqa: BLE001  (told to the parent)
                    os.write(told[1], b"?")
                signal.pause()
                os._exit(0)
        os.close(go[0])
        os.close(go[1])
        results = b"".join(os.read(told[0], 1) for _ in range(num_starts))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(told[0])
        os.close(told[1])
        assert sorted(results) == sorted(b"w----"), f"attempt {attempt}"
        assert [path.name for path in folder.iterdir()] == [OWNER_FILE]


def test_a_start_that_judged_an_earlier_owner_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_owner(tmp_path, LONG_AGO, **ELSEWHERE)
    new: list[bytes] = []

    def meanwhile(*_: object) -> bool:
        if not new:
            new.append(put_owner(tmp_path, host="node8", system="of node8"))
        return True

    monkeypatch.setattr(folder_owner, "_stays", meanwhile)
    with pytest.raises(FolderTakenError, match="node8"):
        FolderClaim(tmp_path, "run")
    assert [path.name for path in tmp_path.iterdir()] == [OWNER_FILE]
    assert (tmp_path / OWNER_FILE).read_bytes() == new[0]


def test_a_silent_owner_elsewhere_is_watched_before_its_folder_is_taken(
    tmp_path: Path, waits: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    put_owner(tmp_path, 130.0, **ELSEWHERE)
    with caplog.at_level(logging.WARNING), FolderClaim(tmp_path, "run"):
        assert sum(waits) == folder_owner.WATCH_SECONDS
    first, second = (record.getMessage() for record in caplog.records)
    assert "process 4321 on node7, with no sign of life for 2 min" in first
    assert "which is gone: this run goes on there" in second


@pytest.mark.parametrize("age", [0.0, 110.0])
def test_an_owner_elsewhere_that_gave_a_sign_of_life_is_left_alone_at_once(
    tmp_path: Path, waits: list[float], age: float
) -> None:
    content = put_owner(tmp_path, age, **ELSEWHERE)
    with pytest.raises(FolderTakenError, match="process 4321 on node7"):
        FolderClaim(tmp_path, "run")
    assert (tmp_path / OWNER_FILE).read_bytes() == content
    assert waits == []


@pytest.mark.parametrize("age", [LONG_AGO, -LONG_AGO], ids=["clock behind", "clock ahead"])
def test_clocks_of_hosts_are_not_compared(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, age: float
) -> None:
    """The file system takes times from its hosts, and they differ: a living owner renews its file."""
    put_owner(tmp_path, age, **ELSEWHERE)

    def renew(seconds: float) -> None:
        waits.append(seconds)
        if sum(waits) >= folder_owner.HEARTBEAT_SECONDS:
            os.utime(tmp_path / OWNER_FILE, (time.time() - age + 3,) * 2)

    with monkeypatch.context() as patch:
        patch.setattr(folder_owner.time, "sleep", renew)
        with pytest.raises(FolderTakenError, match="node7"):
            FolderClaim(tmp_path, "run")
    assert sum(waits) <= folder_owner.HEARTBEAT_SECONDS + 1
    with FolderClaim(tmp_path, "run"):  # it is silent now
        assert json.loads((tmp_path / OWNER_FILE).read_text())["pid"] == os.getpid()
    assert sum(waits) <= folder_owner.SILENT_SECONDS + folder_owner.HEARTBEAT_SECONDS + 1


def test_after_a_reboot_the_host_goes_on_without_the_limit(
    tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_owner, "_seconds_up", lambda: 30.0)
    put_owner(tmp_path, 40.0, system="the boot before")
    FolderClaim(tmp_path, "run").release()
    assert sum(waits) == folder_owner.WATCH_SECONDS
    put_owner(tmp_path, 20.0, system="another host with the same name")
    with pytest.raises(FolderTakenError):
        FolderClaim(tmp_path, "run")


def test_the_machine_was_started_before_this_test() -> None:
    with open("/proc/uptime") as file:
        assert 0 < folder_owner._seconds_up() <= float(file.read().split()[0]) + 1


def test_a_pid_of_another_container_is_not_looked_up(tmp_path: Path) -> None:
    put_owner(tmp_path, 5.0, started=1, system="this boot, another namespace")  # dead if it were looked up
    with pytest.raises(FolderTakenError):
        FolderClaim(tmp_path, "run")


@pytest.mark.parametrize("content", [b"", b"\0" * 80, b"{", b"[]", b'{"host": "a"}', b"\xff"])
def test_a_damaged_file_is_judged_by_its_age(tmp_path: Path, waits: list[float], content: bytes) -> None:
    put_content(tmp_path, content)
    with pytest.raises(FolderTakenError, match="a process that is not named"):
        FolderClaim(tmp_path, "run")
    put_content(tmp_path, content, LONG_AGO)
    FolderClaim(tmp_path, "run").release()


def test_who_has_lost_the_folder_notices_and_leaves_it_to_the_other(tmp_path: Path) -> None:
    claim = FolderClaim(tmp_path, "run")
    claim.require()
    other = put_owner(tmp_path, **ELSEWHERE)
    with pytest.raises(FolderLostError, match="process 4321 on node7 has taken it over"):
        claim.require()
    with pytest.raises(FolderLostError):
        FolderClaim(tmp_path, "another part")
    claim.release()
    assert (tmp_path / OWNER_FILE).read_bytes() == other


def test_an_owner_renews_its_own_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_owner, "HEARTBEAT_SECONDS", 0.001)
    path = tmp_path / OWNER_FILE
    with FolderClaim(tmp_path, "run") as claim:
        for _ in range(2):
            os.utime(path, (1.0, 1.0))
            while path.stat().st_mtime == 1.0:
                time.sleep(0.001)
        put_owner(tmp_path, LONG_AGO, **ELSEWHERE)
        modified = path.stat().st_mtime
        renewals: list[object] = []
        monkeypatch.setattr(folder_owner.os, "utime", lambda *arguments: renewals.append(arguments))
        reads = 0
        found = claim._held.found

        def counted() -> object:
            nonlocal reads
            reads += 1
            return found()

        monkeypatch.setattr(claim._held, "found", counted)
        while reads < 3:
            time.sleep(0.001)
        assert renewals == []
        assert path.stat().st_mtime == modified


def test_a_file_that_the_user_removed_comes_back(tmp_path: Path) -> None:
    claim = FolderClaim(tmp_path / "run", "run")
    path = tmp_path / "run" / OWNER_FILE
    content = path.read_bytes()
    path.unlink()
    claim.require()
    assert path.read_bytes() == content
    path.unlink()
    put_owner(tmp_path / "run", **ELSEWHERE)
    with pytest.raises(FolderLostError, match="removed"):
        claim.require()


def test_parts_of_a_process_share_its_folder_and_each_claims_it_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / OWNER_FILE
    one, two = FolderClaim(tmp_path / "run", "one"), FolderClaim(tmp_path / "run" / ".." / "run", "two")
    with pytest.raises(FolderTakenError, match=f"process {os.getpid()} "):
        FolderClaim(tmp_path / "run", "one")
    one.release()
    one.release()
    assert path.exists()
    FolderClaim(tmp_path / "run", "one")  # forgotten at once
    del two
    assert not path.exists()


def test_a_child_that_ends_leaves_the_folder_to_its_parent(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from verl_rc.config.folder_owner import FolderClaim
claim = FolderClaim(Path({str(tmp_path)!r}), "run")
if os.fork():
    os.wait()
    print((Path({str(tmp_path)!r}) / "owner.json").exists())
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "True\n"
    assert not (tmp_path / OWNER_FILE).exists()  # the end of the process released it


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer\.output_dir must be a folder .*Not a directory"):
        FolderClaim(tmp_path / "file" / "run", "run", "trainer.output_dir")
    assert living_owner(tmp_path / "none") is None


def test_a_thread_that_begins_may_release_another_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As garbage collection in it does."""
    other, start, released = FolderClaim(tmp_path / "other", "run"), threading.Thread.start, threading.Event()

    def collecting(thread: threading.Thread) -> None:
        first = threading.Thread(target=lambda: (other.release(), released.set()), daemon=True)
        start(first)
        first.join(timeout=10)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", collecting)
    with FolderClaim(tmp_path / "one", "run"):
        assert released.is_set()
