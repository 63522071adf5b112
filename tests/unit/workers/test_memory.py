"""Memory of the machine and of a device, in GiB."""

import pytest
import torch

from verl_rc.metrics import reduce_metrics
from verl_rc.workers.host import host_memory
from verl_rc.workers.policy_worker import memory_metrics


def test_the_machine_has_memory_and_uses_some() -> None:
    memory = host_memory()
    assert 1 << 28 < memory["MemAvailable"] < memory["MemTotal"] < 1 << 50
    before = reduce_metrics(memory_metrics(torch.device("cpu")))
    assert set(before) == {"perf/cpu_memory_used_gb"}
    assert 0 < before["perf/cpu_memory_used_gb"] < memory["MemTotal"] / 2**30
    held = torch.ones(1 << 27)  # 0.5 GiB, every page of it written
    after = reduce_metrics(memory_metrics(torch.device("cpu")))
    assert after["perf/cpu_memory_used_gb"] - before["perf/cpu_memory_used_gb"] > 0.2
    del held


def test_a_device_reports_its_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda _: 3 << 30)
    monkeypatch.setattr("torch.cuda.max_memory_reserved", lambda _: 9 << 29)
    of_two_ranks = [*memory_metrics(torch.device("cuda", 0)), *memory_metrics(torch.device("cuda", 1))]
    metrics = reduce_metrics(of_two_ranks)
    assert metrics["perf/max_memory_allocated_gb"] == 3.0
    assert metrics["perf/max_memory_reserved_gb"] == 4.5
