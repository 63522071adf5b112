"""Processes that hang, for real: one sleeps, one is stopped, one waits in a collective for a peer that never comes."""

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_rc.cluster.ray_session import start_ray
from verl_rc.cluster.remote import HangError, RemoteProcess, wait_for_all
from verl_rc.cluster.watchdog import WATCHDOG
from verl_rc.config.trainer import RayInitConfig

HANGING = """
import os, signal, time

class Hanging:
    def pid(self):
        return os.getpid()

    def nap(self):
        time.sleep(600)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def join(self, rank, port):
        import torch.distributed as dist
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def reduce(self):
        import torch, torch.distributed as dist
        dist.all_reduce(torch.zeros(1))
"""


@pytest.fixture(scope="module")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    folder = tmp_path_factory.mktemp("hanging")
    (folder / "hanging.py").write_text(HANGING)
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    start_ray(RayInitConfig(), processes=3)
    yield
    ray.shutdown()
    patch.undo()


def hanging(*names: str) -> list[RemoteProcess]:
    processes = [RemoteProcess(name, {}) for name in names]
    wait_for_all([process.build("hanging:Hanging") for process in processes])
    return processes


def has_ended(pid: int) -> bool:
    """Gone, or dead and not yet reaped."""
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()


@pytest.mark.usefixtures("ray_here")
def test_a_hang_is_reported_with_stacks_and_ends_in_bounded_time(tmp_path: Path) -> None:
    processes = sleeper, stopped, well = hanging("actor rank 0", "rollout engine 1", "actor rank 1")
    pids = wait_for_all([process.call("pid") for process in processes])
    started = time.monotonic()
    with pytest.raises(HangError) as caught, WATCHDOG.watching(2.0, tmp_path):
        wait_for_all([sleeper.call("nap"), stopped.call("stop"), well.call("pid")])
    assert time.monotonic() - started < 12
    message = str(caught.value)
    assert "did not answer within 2 s: actor rank 0 (nap), rollout engine 1 (stop)." in message
    assert "actor rank 0: at nap (" in message
    assert "rollout engine 1: is stopped by a signal (SIGSTOP)" in message
    assert "last sign of life: answered pid" in message
    assert "These answered: actor rank 1." in message
    assert "trainer.hang_timeout_seconds" in message
    (report,) = tmp_path.glob("hang-*.txt")
    assert str(report) in message
    text = report.read_text()
    assert "hanging.py" in text
    assert "in nap" in text
    assert "test_watchdog.py" in text  # where the driver waits
    assert "no stacks: it is stopped by a signal" in text
    deadline = time.monotonic() + 5
    while not all(has_ended(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert all(has_ended(pid) for pid in pids)


@pytest.mark.usefixtures("ray_here")
def test_who_blocks_in_a_collective_is_told_from_who_does_not_come(tmp_path: Path) -> None:
    ranks = hanging("actor rank 0", "actor rank 1")
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    wait_for_all([process.call("join", rank, port) for rank, process in enumerate(ranks)])
    with pytest.raises(HangError) as caught, WATCHDOG.watching(2.0, tmp_path):
        wait_for_all([ranks[0].call("reduce"), ranks[1].call("nap")])
    lines = str(caught.value).splitlines()
    assert [line for line in lines if line.startswith("  actor rank 0: waits in a collective for its peers, at all_reduce (")]
    assert [line for line in lines if line.startswith("  actor rank 1: at nap (")]
