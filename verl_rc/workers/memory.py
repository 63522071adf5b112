"""How much memory a machine and its devices have given away."""

from pathlib import Path

import torch

from verl_rc.metrics import Metric, Reduction

_GIB = 1 << 30


def host_memory() -> dict[str, int]:
    """Bytes of this machine by the names of ``/proc/meminfo``: ``MemTotal``, ``MemAvailable``, …"""
    fields = (line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines())
    return {name: int(value.split()[0]) << 10 for name, value in fields}


def memory_metrics(device: torch.device) -> list[Metric]:
    """``perf/*memory*`` in GiB, the largest over the ranks: verl's ``actor/perf/*`` under the names it had before."""
    memory = host_memory()
    used = {"perf/cpu_memory_used_gb": memory["MemTotal"] - memory["MemAvailable"]}
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device)
        used["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device)
    return [Metric(name, size / _GIB, Reduction.MAX) for name, size in used.items()]
