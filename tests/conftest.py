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

WHOLE_RUNS = (
    "tests/chaos/",
    "tests/integration/test_every_algorithm.py",
    "tests/integration/test_other_ways.py",
    "tests/integration/test_resume.py",
    "tests/integration/test_two_steps.py",
)
"""Tests that start the program as a user does; several share the folder of one run."""

REAL_PARTS = ("tests/integration/",)
"""Tests that start Ray, an engine or ranks in their own process, which holds one Ray at a time."""


class OneProcessForEachKindOfRun(LoadScopeScheduling):
    """Who runs what where pytest-xdist shares tests out: whole runs stay together, real parts too, and the rest file by file."""

    def _split_scope(self, nodeid: str) -> str:
        for scope, paths in (("whole runs", WHOLE_RUNS), ("real parts", REAL_PARTS)):
            if nodeid.startswith(paths):
                return scope
        return nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return OneProcessForEachKindOfRun(config, log)
