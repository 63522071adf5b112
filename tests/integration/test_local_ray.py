"""A Ray of our own: it comes up at the second attempt, runs workers at normal priority, and listens on
loopback alone."""

import ctypes
import os
import signal
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import ray
from listening_sockets import family, listening

from verl_rc.cluster.remote import RemoteProcess, wait_for_all
from verl_rc.distributed.network import listen
from verl_rc.distributed.process_group import open_store

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
