"""Settings that every test process shares; they must be in the environment before torch, Ray or wandb load."""

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)

from hypothesis import HealthCheck, settings  # noqa: E402  (after the environment)

# a busy machine is no defect of the code under test
settings.register_profile("verl_rc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("verl_rc")

REAL_RUNS = ("tests/integration/", "tests/chaos/", "tests/unit/weight_sync/")
"""Tests that load both cores, or look for processes and shared memory that others leave behind."""


class RealRunsInOneProcess(LoadScopeScheduling):
    """Who runs what where pytest-xdist shares the tests out: one process all real runs, and each a whole file of the rest."""

    def _split_scope(self, nodeid: str) -> str:
        return "real runs" if nodeid.startswith(REAL_RUNS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return RealRunsInOneProcess(config, log)
