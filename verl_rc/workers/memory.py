"""How much memory a machine and its devices have given away."""

import torch

from verl_rc.metrics import Metric, Reduction
from verl_rc.workers.host import host_memory

_GIB = 1 << 30


def memory_metrics(device: torch.device) -> list[Metric]:
    """``perf/*memory*`` in GiB, the largest over the ranks: verl's ``actor/perf/*`` under the names it had before."""
    memory = host_memory()
    used = {"perf/cpu_memory_used_gb": memory["MemTotal"] - memory["MemAvailable"]}
    if device.type == "cuda":
        used["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device)
        used["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device)
    return [Metric(name, size / _GIB, Reduction.MAX) for name, size in used.items()]
