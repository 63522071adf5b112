"""A Ray of our own: it comes up at the second attempt, runs workers at normal priority, and listens on
loopback alone."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import ray
from listening_sockets import family, listening

from verl_rc.runtime.distributed.network import listen
from verl_rc.runtime.distributed.process_group import open_store
from verl_rc.trainer.cluster.ray_session import ask_ray
from verl_rc.trainer.cluster.remote import RemoteProcess, wait_for_all

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


@pytest.mark.usefixtures("ray_here")
def test_what_the_failed_first_start_left_is_gone() -> None:
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in family(str(os.getpid()))]
    assert sum(command.endswith(b"/raylet") for command in commands) == 1
    assert sum(command.endswith(b"/gcs_server") for command in commands) == 1


@pytest.mark.usefixtures("ray_here")
def test_rays_own_handler_of_sigterm_is_not_left_behind() -> None:
    get_handler = ctypes.pythonapi.PyOS_getsig
    get_handler.restype = ctypes.c_void_p
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert get_handler(signal.SIGTERM) is None  # the null pointer: SIG_DFL


@pytest.mark.usefixtures("ray_here")
def test_workers_run_at_the_priority_of_the_driver() -> None:
    pid = ray.get(RemoteProcess("worker", {}).identity).pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, os.getpid())


NEIGHBOUR = """
import os, sys
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray._raylet import GcsClient  # read while the other user's files may be
address, session, token = sys.argv[1:]
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
else:
    session = token = "/nowhere"  # a process of the same user may read its files
for path in (session, token):
    try:
        os.stat(path)
        print("found", path)
    except OSError:
        pass
try:
    client = GcsClient(address=address)
    client.internal_kv_put(b"RemoteFunction:planted", b"code", True, b"fun", timeout=10)
    print("written")
except Exception as error:
    print(type(error).__name__)
"""
"""Another user's program, which would write code into Ray's store for workers to run."""


@pytest.mark.usefixtures("ray_here")
def test_another_user_can_neither_write_code_into_ray_nor_read_its_files() -> None:
    context = ray.get_runtime_context()
    session = ray._private.worker._global_node.get_session_dir_path()
    token = os.environ["RAY_AUTH_TOKEN_PATH"]
    arguments = [context.gcs_address, session, token]
    ended = subprocess.run(
        [sys.executable, "-c", NEIGHBOUR, *arguments], capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.split() == ["AuthenticationError"], ended.stderr


@pytest.mark.usefixtures("ray_here")
def test_the_command_of_the_log_asks_for_rays_state() -> None:
    ended = subprocess.run(
        ["bash", "-c", ask_ray()],
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


def test_every_socket_is_on_loopback(ray_here: set[tuple[str, str]]) -> None:
    process = RemoteProcess("worker", {})
    host, port = wait_for_all([process.listen()])[0]
    assert host == "127.0.0.1"
    store = open_store(host, listen(host), 1, True, timedelta(seconds=120))
    found = listening(family(str(os.getpid()))) - ray_here
    assert f"{port:04X}" in {used for _, used in found}  # the worker's is among them
    assert len(found) > 3  # so are Ray's
    assert {address for address, _ in found} <= LOOPBACK, found
    del store


def test_the_check_itself() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert not {address for address, _ in listening({str(os.getpid())})} <= LOOPBACK
