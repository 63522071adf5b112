"""Settings that every test process shares; they must be in the environment before torch, Ray or wandb
load."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

for name, value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)

from hypothesis import HealthCheck, settings  # noqa: E402  (after the environment)

from verl_rc.runtime.distributed.child_process import importing  # noqa: E402
from verl_rc.runtime.exact import EXACT_ENVIRONMENT  # noqa: E402

# a busy machine is no defect of the code under test
settings.register_profile("verl_rc", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("verl_rc")

ENVIRONMENT = set(os.environ)
"""Names of the variables that this process was started with, and of those above."""

WHOLE_RUNS = (
    "tests/chaos/",
    "tests/integration/test_every_key_arrives.py",
    "tests/integration/test_other_ways.py",
    "tests/integration/test_resume.py",
    "tests/integration/test_two_steps.py",
)
SHARED = {"whole runs": WHOLE_RUNS, "real parts": ("tests/integration/",)}
"""Tests whose start takes long: those that start the program as a user does share one run's folder; the
others in tests/integration share an engine (``small_engine``), and start Ray in their own process, which
holds one at a time, so that the run with faulty workers comes last."""


class WhatIsSharedStaysTogether(LoadScopeScheduling):
    """Distributes files over the processes of pytest-xdist; files that share a start go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((scope for scope, paths in SHARED.items() if file.startswith(paths)), file)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """All tests are imported here, with every library that they test."""
    with importing():
        return (yield)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return WhatIsSharedStaysTogether(config, log)


@pytest.fixture(autouse=True)
def _sums_are_held_in_exact_mode_alone() -> Iterator[None]:
    """Exact mode sets them for its process, which here goes on with other tests."""
    yield
    for of_device in EXACT_ENVIRONMENT.values():
        for name in of_device.keys() - ENVIRONMENT:
            os.environ.pop(name, None)
