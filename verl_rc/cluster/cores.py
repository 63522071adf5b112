"""How many cores this process may really use: a container may have 2 of the 64 that the machine has."""

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores() -> int:
    """Cores of the affinity mask, at most what the cgroups' CPU limits allow (rounded up), at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    return max(1, min([cores, *(int(-(-limit // 1)) for limit in _cgroup_limits())]))


def _cgroup_limits() -> Iterator[float]:
    """The CPU limits of this process's cgroups and of all cgroups around them, in cores."""
    for folder in _own_cgroup_folders():
        limit = _read(folder / "cpu.max").split()  # version 2: "200000 100000", or "max 100000"
        if not limit:  # version 1
            limit = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        if all(part.isdigit() for part in limit) and int(limit[1]) > 0:
            yield int(limit[0]) / int(limit[1])


def _own_cgroup_folders() -> Iterator[Path]:
    """In a container the paths of the host may be shown, which do not exist: the root is always looked at."""
    for line in _read(_OWN_CGROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUP_ROOT / "cpu" if controllers else _CGROUP_ROOT
        inner = root / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
