"""A Ray of our own: it survives a first start that fails, runs its workers at normal priority, and listens on loopback alone."""

import os
import re
import socket
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ray
from ray._private import services

from verl_rc.cluster.ray_session import start_ray
from verl_rc.cluster.remote import RemoteProcess, wait_for_all
from verl_rc.config.trainer import RayInitConfig
from verl_rc.distributed.store import open_store

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same as an IPv6 address, and ::1, as the kernel writes them."""


def listening(pids: set[str]) -> set[tuple[str, str]]:
    """Address and port of every TCP socket on which one of the processes listens."""
    sockets = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                sockets[fields[9]] = tuple(fields[1].split(":"))
    found = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)) if descriptor.is_symlink() else None
            if match and match[1] in sockets:
                found.add(sockets[match[1]])
    return found


def family(pid: str) -> set[str]:
    """A process and all its descendants."""
    children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return {pid}.union(*(family(child) for child in children))


@pytest.fixture(scope="module")
def worker() -> Iterator["Worker"]:
    """A process of a Ray whose first start failed after its servers were up, and the sockets that were there before."""
    before = listening(family(str(os.getpid())))  # of tests that ran in this process
    with pytest.MonkeyPatch.context() as patch:
        real, failures = services.get_node, [Exception("The current node timed out during startup.")]

        def fails_once(*arguments: Any) -> Any:
            if failures:
                raise failures.pop()
            return real(*arguments)

        patch.setattr(services, "get_node", fails_once)
        start_ray(RayInitConfig(), processes=1)
        assert not failures
    try:
        yield RemoteProcess("worker", {}), before
    finally:
        ray.shutdown()


Worker = tuple[RemoteProcess, set[tuple[str, str]]]


def test_what_the_failed_start_left_is_gone(worker: Worker) -> None:
    assert ray.is_initialized()
    wait_for_all([worker[0].free_address()])
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0] for pid in family(str(os.getpid()))]
    assert sum(command.endswith(b"/raylet") for command in commands) == 1
    assert sum(command.endswith(b"/gcs_server") for command in commands) == 1


def test_workers_run_at_the_priority_of_the_driver(worker: Worker) -> None:
    pid = ray.get(worker[0].identity).pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == os.getpriority(os.PRIO_PROCESS, os.getpid())


def test_every_socket_is_on_loopback(worker: Worker) -> None:
    process, before = worker
    host, port = wait_for_all([process.free_address()])[0]
    assert host == "127.0.0.1"
    store = open_store(host, port, 1, True, timedelta(seconds=20))
    found = listening(family(str(os.getpid()))) - before
    assert f"{port:04X}" in {used for _, used in found}  # the store's is among them
    assert len(found) > 3  # so are Ray's
    assert {address for address, _ in found} <= LOOPBACK, found
    del store


def test_the_check_itself() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert not {address for address, _ in listening({str(os.getpid())})} <= LOOPBACK
