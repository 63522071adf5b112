"""A Ray of our own listens on the loopback interface and nowhere else."""

import os
import re
import socket
from datetime import timedelta
from pathlib import Path

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


def test_every_socket_is_on_loopback() -> None:
    import ray

    before = listening(family(str(os.getpid())))  # of tests that ran in this process
    start_ray(RayInitConfig(), processes=1)
    try:
        process = RemoteProcess("worker", {})
        host, port = wait_for_all([process.free_address()])[0]
        assert host == "127.0.0.1"
        store = open_store(host, port, 1, True, timedelta(seconds=20))
        found = listening(family(str(os.getpid()))) - before
        assert f"{port:04X}" in {used for _, used in found}  # the store's is among them
        assert len(found) > 3  # so are Ray's
        assert {address for address, _ in found} <= LOOPBACK, found
        del store
    finally:
        ray.shutdown()


def test_the_check_itself() -> None:
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        everywhere.listen()
        assert not {address for address, _ in listening({str(os.getpid())})} <= LOOPBACK
