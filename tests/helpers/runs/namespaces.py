"""Nodes of a cluster on this machine, each in namespaces of its own, with a hostname that resolves to
127.0.1.1 as on Debian."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "cluster0"
SWITCH_ADDRESS = "10.77.0.254"
_OWN = ["--net", "--mount", "--uts", "--pid"]
_READY = "node is ready"
_SETUP = """
set -e
ip link set lo up
hostname {hostname}
printf '127.0.0.1 localhost\\n127.0.1.1 {hostname}\\n' > {folder}/hosts
mount --bind {folder}/hosts /etc/hosts
mount -t tmpfs -o size=1g tmpfs /dev/shm
mkdir -p /tmp/ray {folder}/ray
mount --bind {folder}/ray /tmp/ray
echo {ready}
exec sleep infinity
"""


class Node:
    """A node with its hostname, ``/etc/hosts``, processes, shared memory, network and Ray's folder."""

    def __init__(self, network: "Network", number: int, folder: Path) -> None:
        """Start it at the port ``number`` of the network's switch."""
        self.address, self.number, self._network = f"10.77.0.{number}", number, network
        folder.mkdir(parents=True)
        script = _SETUP.format(hostname=f"node-{number}", folder=folder, ready=_READY)
        command = ["unshare", *_OWN, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
        self._process = _started(network.inside(command))
        self._init = _child_of(self._process.pid)
        try:
            self._connect()
        except BaseException:
            self.stop()
            raise

    def _connect(self) -> None:
        network, number = self._network, self.number
        network.run(
            "ip",
            "link",
            "add",
            f"port{number}",
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            str(self._init),
        )
        network.run("ip", "link", "set", f"port{number}", "master", "switch", "up")
        self.run(["ip", "addr", "add", f"{self.address}/24", "dev", INTERFACE])
        self.run(["ip", "link", "set", INTERFACE, "up"])
        self.run(["ip", "route", "add", "default", "via", SWITCH_ADDRESS])

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command on the node."""
        inside = ["nsenter", f"--target={self._init}", *_AS_ROOT, *_OWN, "--", *command]
        return subprocess.Popen(inside, env={**os.environ, **(environment or {})}, text=True, **options)

    def run(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, timeout: float = 300.0
    ) -> str:
        """Run a command on the node and return its output; fails when the command does."""
        with self.start(command, environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, output
        return output

    def cut_off(self) -> None:
        """Take its network away, and then end all its processes at once: no peer is told."""
        self._network.run("ip", "link", "set", f"port{self.number}", "down")
        self.stop()

    def stop(self) -> None:
        """End all its processes, and free its port for another node."""
        self._process.kill()
        self._process.wait()
        with suppress(OSError):  # the kernel may have removed it with the node
            self._network.run("ip", "link", "delete", f"port{self.number}")


class Network:
    """A switch to which nodes are connected."""

    def __init__(self) -> None:
        """Raises ``OSError`` with the reason when this machine does not allow it."""
        missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
        if missing:
            raise OSError(f"there is no {', '.join(missing)}")
        user = ["--user", "--map-root-user"] if _AS_ROOT else []
        self._process = _started(
            ["unshare", *user, "--net", "--mount", "bash", "-c", f"echo {_READY}; exec sleep infinity"]
        )
        try:
            self.run("ip", "link", "set", "lo", "up")
            self.run("ip", "link", "add", "switch", "type", "bridge")
            self.run("ip", "addr", "add", f"{SWITCH_ADDRESS}/24", "dev", "switch")
            self.run("ip", "link", "set", "switch", "up")
        except OSError:
            self.close()
            raise

    def inside(self, command: Sequence[str]) -> list[str]:
        """``command`` with the rights and the network of the switch."""
        return ["nsenter", f"--target={self._process.pid}", *_AS_ROOT, "--net", "--mount", "--", *command]

    def run(self, *command: str) -> None:
        """Run a command beside the switch; raises ``OSError``."""
        done = subprocess.run(self.inside(command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    def close(self) -> None:
        """End the switch."""
        self._process.kill()
        self._process.wait()


_AS_ROOT = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]


def _started(command: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A process that has said that it is ready; raises ``OSError`` with what it said instead."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline().decode().strip() != _READY:
        raise OSError(process.communicate()[1].decode().strip())
    return process


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@contextmanager
def network_of(folder: Path, *numbers: int) -> Iterator[tuple[Network, list[Node]]]:
    """A network with these nodes; the test is skipped where namespaces are not allowed."""
    nodes: list[Node] = []
    try:
        network = Network()
    except OSError as error:
        pytest.skip(f"two nodes on this machine need namespaces: {error}")
    try:
        nodes += [Node(network, number, folder / f"node-{number}") for number in numbers]
        yield network, nodes
    finally:
        for node in nodes:
            node.stop()
        network.close()
