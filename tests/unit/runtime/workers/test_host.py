"""Cores come from the affinity mask and the CPU limits of cgroups, memory from the kernel and their memory
host."""

import os
from pathlib import Path

import pytest

from verl_rc.runtime.workers import host


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """64 cores and 64 GiB without limits; files below the folder stand for the cgroup file system."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(host, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host, "host_memory", lambda: {"MemAvailable": 64 << 30})
    monkeypatch.setattr(host, "_OWN_CGROUPS", tmp_path / "own")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.usefixtures("machine")
def test_without_a_limit_the_affinity_mask_decides() -> None:
    assert host.usable_cores() == 64


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 64)],
)
def test_version_2(machine: Path, quota: str, expected: int) -> None:
    write(machine / "own", "0::/service/job\n")
    write(machine / "service/job/cpu.max", quota)
    assert host.usable_cores() == expected


def test_a_limit_of_a_cgroup_around_ours_counts(machine: Path) -> None:
    write(machine / "own", "0::/service/job\n")
    write(machine / "service/cpu.max", "300000 100000")
    write(machine / "service/job/cpu.max", "max 100000")
    assert host.usable_cores() == 3


@pytest.mark.parametrize(("quota", "expected"), [("200000", 2), ("-1", 64)])
def test_version_1(machine: Path, quota: str, expected: int) -> None:
    write(machine / "own", "4:memory:/job\n3:cpu,cpuacct:/job\n")
    write(machine / "cpu/job/cpu.cfs_quota_us", quota)
    write(machine / "cpu/job/cpu.cfs_period_us", "100000")
    assert host.usable_cores() == expected


def test_a_container_that_sees_the_path_of_its_host(machine: Path) -> None:
    write(machine / "own", "0::/docker/1234\n")
    write(machine / "cpu.max", "200000 100000")
    assert host.usable_cores() == 2


def test_no_affinity(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert machine.is_dir()
    assert host.usable_cores() == 5


@pytest.mark.usefixtures("machine")
def test_without_a_limit_free_memory_decides() -> None:
    assert host.available_memory() == 64 << 30


@pytest.mark.parametrize(
    ("files", "controllers", "cache"),
    [
        (("memory.max", "memory.current"), "", "inactive_file 536870912\nactive_file 0\n"),
        (
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "memory",
            "inactive_file 1\nactive_file 2\ntotal_inactive_file 268435456\ntotal_active_file 268435456\n",
        ),
    ],
)
def test_memory_limits(machine: Path, files: tuple[str, str], controllers: str, cache: str) -> None:
    write(machine / "own", f"0:{controllers}:/service/job\n")
    write(machine / controllers / "service" / files[0], str(4 << 30))
    write(machine / controllers / "service" / files[1], str(3 << 30))
    assert host.available_memory() == 1 << 30
    write(machine / controllers / "service/memory.stat", cache)
    assert host.available_memory() == 3 << 29
    write(machine / controllers / "service/job" / files[0], "max")
    write(machine / controllers / "service/job" / files[1], str(1 << 30))
    assert host.available_memory() == 3 << 29
