"""Cores and memory of this machine that the process may use: a container may have 2 of 64 cores, and a part
of the memory.

Imports nothing heavy.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def host_memory() -> dict[str, int]:
    """Bytes of this machine by the names of ``/proc/meminfo``: ``MemTotal``, ``MemAvailable``, …"""
    fields = (line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in fields}


def usable_cores() -> int:
    """Cores of the affinity mask, at most what the CPU limits of cgroups allow (rounded up), at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    for folder in _cgroups("cpu"):
        limit = _numbers(folder, "cpu.max") or _numbers(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if limit and limit[1] > 0:
            # Rounded up: a container with 1.5 cores can keep two threads busy part of the time.
            cores = min(cores, -(-limit[0] // limit[1]))
    return max(1, cores)


def available_memory() -> int:
    """Bytes of host memory that new processes can have: what is free, at most what the memory limits of
    cgroups leave."""
    available = host_memory()["MemAvailable"]
    for folder in _cgroups("memory"):
        limit = _numbers(folder, "memory.max", "memory.current") or _numbers(
            folder, "memory.limit_in_bytes", "memory.usage_in_bytes"
        )
        if limit:
            # A container's own limit: /proc/meminfo shows the memory of the whole host in it.
            available = min(available, limit[0] - limit[1] + _file_cache(folder))
    return max(0, available)


def _file_cache(folder: Path) -> int:
    """Bytes that a cgroup uses to cache files, which the kernel gives back when processes need memory."""
    fields = (line.split() for line in _read(folder / "memory.stat").splitlines())
    statistics = {
        name.removeprefix("total_"): int(value) for name, value in fields
    }  # totals (version 1) come last
    return statistics.get("inactive_file", 0) + statistics.get("active_file", 0)


def _cgroups(controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and of all around it, of version 2 and of the controller's version 1.

    In a container the path of the host may be shown, which does not exist there; its root always does.
    """
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = _CGROUP_ROOT / controller if controllers else _CGROUP_ROOT
            cgroup = root / path.lstrip("/")
            yield from (folder for folder in (cgroup, *cgroup.parents) if folder.is_relative_to(root))


def _numbers(folder: Path, *files: str) -> list[int]:
    """The two numbers of these files; none where a file is missing or sets no limit ("max", -1)."""
    words = [word for file in files for word in _read(folder / file).split()]
    return [int(word) for word in words] if len(words) == 2 and all(word.isdigit() for word in words) else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
