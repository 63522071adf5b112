"""Processes that hang, for real: one sleeps, one is stopped, one waits in a collective for a peer that never
comes."""

import time
from pathlib import Path

import pytest
from small_processes import start_small_processes
from two_processes import free_port

from verl_rc.runtime.distributed.child_process import HangError
from verl_rc.trainer.cluster import watchdog
from verl_rc.trainer.cluster.remote import RemoteProcess, wait_for_all
from verl_rc.trainer.cluster.watchdog import WATCHDOG, identity_of

PATIENCE_SECONDS = 120.0
"""Bounds waits that end by themselves, on however busy a machine."""


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_DUMP_SECONDS", PATIENCE_SECONDS)


def until_found(process: RemoteProcess, words: str) -> None:
    """Wait until a look into the process shows ``words``."""
    identity, deadline = identity_of(process), time.monotonic() + PATIENCE_SECONDS
    assert identity is not None
    while words not in str(watchdog.inspect_process(identity)):
        assert time.monotonic() < deadline, watchdog.inspect_process(identity)
        time.sleep(0.05)


def is_finished(pid: int) -> bool:
    """Gone, or dead and not yet reaped."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.usefixtures("ray_here")
def test_a_hang_is_reported_with_stacks_and_ends_the_processes(tmp_path: Path) -> None:
    processes = sleeper, stopped, well = start_small_processes(
        "actor rank 0", "rollout engine 1", "actor rank 1"
    )
    pids = wait_for_all([process.call("pid") for process in processes])
    calls = [sleeper.call("nap"), stopped.call("stop"), well.call("pid")]
    wait_for_all(calls[2:])
    until_found(sleeper, "in nap")
    until_found(stopped, "SIGSTOP")
    with pytest.raises(HangError) as caught, WATCHDOG.watching(1.0, tmp_path):
        wait_for_all(calls)
    message = str(caught.value)
    assert "did not answer within 1 s: actor rank 0 (nap), rollout engine 1 (stop)." in message
    assert "actor rank 0: at nap (" in message
    assert "rollout engine 1: is stopped by a signal (SIGSTOP)" in message
    assert "last sign of life: answered pid" in message
    assert "These answered: actor rank 1." in message
    assert "trainer.hang_timeout_seconds" in message
    (report,) = tmp_path.glob("hang-*.txt")
    assert str(report) in message
    text = report.read_text()
    assert "small_processes.py" in text
    assert "in nap" in text
    assert "test_watchdog.py" in text  # where the driver waits
    assert "no stacks: it is stopped by a signal" in text
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not all(is_finished(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(is_finished(pid) for pid in pids)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_here")
def test_who_blocks_in_a_collective_is_told_from_who_does_not_come(tmp_path: Path) -> None:
    ranks = start_small_processes("actor rank 0", "actor rank 1")
    port = free_port()
    wait_for_all([process.call("join", rank, port) for rank, process in enumerate(ranks)])
    calls = [ranks[0].call("reduce"), ranks[1].call("nap")]
    until_found(ranks[0], "in all_reduce")
    until_found(ranks[1], "in nap")
    with pytest.raises(HangError) as caught, WATCHDOG.watching(1.0, tmp_path):
        wait_for_all(calls)
    lines = str(caught.value).splitlines()
    assert [
        line
        for line in lines
        if line.startswith("  actor rank 0: waits in a collective for its peers, at all_reduce (")
    ]
    assert [line for line in lines if line.startswith("  actor rank 1: at nap (")]
