"""A child that fails, dies, hangs or loses its parent, in real processes."""

import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_runs import HELPERS, ROOT

from verl_rc.runtime.distributed.child_process import ChildProcess, HangError, ProcessLostError, RemoteError


@contextmanager
def child(**environment: str) -> Iterator[ChildProcess]:
    process = ChildProcess("served_objects:Served", environment, name="one")
    try:
        yield process
    finally:
        process.kill()


def wait_for_end_of(pid: int) -> None:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.02)


def test_calls_reach_the_object_and_an_error_leaves_it_alive() -> None:
    with child(SERVED_WITH="set before the import") as process:
        assert process.call("greeting") == "one: set before the import"
        assert process.call("pid") != os.getpid()
        with pytest.raises(RemoteError, match=r"(?s)in complain.*KeyError: 'lost'"):
            process.call("complain", "lost")
        values = torch.arange(6.0)
        assert process.call("doubled", values).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_package_of_our_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "verl_rc").mkdir()
    (tmp_path / "verl_rc" / "__init__.py").write_text("raise AssertionError\n")
    monkeypatch.chdir(tmp_path)
    with child() as process:
        assert process.call("greeting") == "one: None"


def test_garbage_collection_leaves_alone_what_was_imported_and_goes_on() -> None:
    with child() as process:
        is_on, left_alone = process.call("garbage_collection")
    assert is_on
    assert left_alone > 1_000  # 0 if none were left alone


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (("leave", 3), "^its process ended with exit code 3$"),
        (("crash",), "^its process was ended by SIGSEGV$"),
    ],
)
def test_a_death_says_how_it_came(call: tuple[str, int], reason: str) -> None:
    with child() as process, pytest.raises(ProcessLostError, match=reason):
        process.call(*call)
    with pytest.raises(ProcessLostError):  # and a later call too
        process.call("pid")


def test_a_hang_ends_at_its_deadline_and_children_go_with_the_process() -> None:
    with child() as process:
        grandchild = process.call("start_child")
        process.ask("hang", timeout_seconds=0.2)
        with pytest.raises(HangError, match=r"^it took longer than 0\.2 s$"):
            process.answer()
    wait_for_end_of(grandchild)


def test_a_daemon_ends_with_the_process(tmp_path: Path) -> None:
    with child() as process:
        daemon = process.call("start_daemon", str(tmp_path / "pid"))
    wait_for_end_of(daemon)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"junk", "a message must have at most"),  # a length of 1.8e9
        (b"\xff\xff\xff\xff" * 3, "a message must have at most"),
        (b"\x80\0\0\0", "a message must have at most"),
        (b"\0\0\0\0", "must be a pickle"),
        (b"\0\0\0\x04junk", "must be a pickle"),
        (b"\0\0\0\x0a" + b"cos\nnone\n.", "must be a pickle"),  # a name that is not there
        (struct.pack("!i", len(pickle.dumps(5))) + pickle.dumps(5), "wrote into its connection: 5"),
        (b"\0\0\0\x40" + b"half", None),
        (b"\0\0", None),
    ],
)
def test_whatever_it_writes_into_its_connection_is_a_failure_in_time(data: bytes, reason: str | None) -> None:
    """None: it is the beginning of a message."""
    with child() as process:
        process.ask("write_into_connection", data, timeout_seconds=600 if reason else 0.5)
        with pytest.raises(ProcessLostError, match=reason or r"^it took longer than 0\.5 s$"):
            process.answer()


def test_a_process_that_does_not_read_is_late() -> None:
    with child() as process:
        process.call("stop")
        status = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().strip()
        while ") T" not in Path(f"/proc/{status}/stat").read_text():
            time.sleep(0.01)
        process.ask("complain", "x" * 10_000_000, timeout_seconds=0.5)
        with pytest.raises(HangError):
            process.answer()


def test_a_variable_that_is_none_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVED_WITH", "inherited")
    monkeypatch.setenv("AN_API_KEY", "secret")
    process = ChildProcess("served_objects:Served", {"AN_API_KEY": None}, name="one")
    variables = process.call("variables")
    supervisor = Path(f"/proc/{process.pid}/environ").read_bytes()
    process.kill()
    assert variables["SERVED_WITH"] == "inherited"
    assert "AN_API_KEY" not in variables
    assert b"AN_API_KEY" not in supervisor


def test_an_object_that_cannot_be_made_says_why() -> None:
    with pytest.raises(RemoteError, match=r"TypeError: .*unexpected keyword argument 'size'"):
        ChildProcess("served_objects:Served", {}, name="one", size=3)


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Also while its object computes and answers nothing, and with its daemons."""
    program = (
        "import time; from verl_rc.runtime.distributed.child_process import ChildProcess; "
        "process = ChildProcess('served_objects:Served', {}, name='one'); "
        f"print(process.call('start_daemon', {str(tmp_path / 'pid')!r}), process.call('pid'), flush=True); "
        "process.ask('hang'); time.sleep(3600)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{HELPERS}"}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = list(map(int, parent.stdout.readline().split()))
        parent.kill()
    for pid in pids:
        wait_for_end_of(pid)


def test_the_end_is_orderly(tmp_path: Path) -> None:
    process = ChildProcess("served_objects:Served", {}, name="one")
    process.call("write_at_exit", str(tmp_path / "ended"))
    process.end()
    assert (tmp_path / "ended").read_text() == "one"
