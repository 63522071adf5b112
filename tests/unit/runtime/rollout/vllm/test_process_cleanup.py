"""A child dies with its parent, even when it is stopped and the parent is killed; shared memory goes with its
last user."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from verl_rc.runtime.rollout.vllm.process_cleanup import unlink_shared_memory

ROOT = Path(__file__).parents[5]
FAMILY = """
import multiprocessing, os, signal, time
from verl_rc.runtime.rollout.vllm.process_cleanup import die_with_parent

def stop():
    die_with_parent()
    os.kill(os.getpid(), signal.SIGSTOP)

if __name__ == "__main__":
    die_with_parent()  # nobody's child: nothing happens
    child = multiprocessing.get_context("fork").Process(target=stop)
    child.start()
    print(child.pid, flush=True)
    time.sleep(3600)
"""


def state_of(pid: int) -> str:
    """The kernel's letter; X for a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_for(pid: int, states: str) -> None:
    deadline = time.monotonic() + 120
    while state_of(pid) not in states:
        assert time.monotonic() < deadline, f"process {pid} is in state {state_of(pid)}"
        time.sleep(0.01)


def test_a_stopped_child_dies_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text(FAMILY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "family.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        wait_for(child, "T")
        parent.send_signal(signal.SIGKILL)
        wait_for(child, "XZ")


def test_memory_without_a_name_lasts_as_long_as_it_is_used() -> None:
    ours = SharedMemory(create=True, size=64)
    both = SharedMemory(name=ours.name)
    path = Path("/dev/shm") / ours.name.lstrip("/")
    assert path.exists()
    unlink_shared_memory()
    assert not path.exists()
    ours.buf[:3] = b"yes"
    assert bytes(both.buf[:3]) == b"yes"
    both.close()
    ours.close()
    resource_tracker.unregister(
        f"/{path.name}", "shared_memory"
    )  # else it misses the name when pytest ends, and says so
    unlink_shared_memory()  # none left: nothing happens
