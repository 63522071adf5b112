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
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "WANDB_MODE": "offline",
}.items():
    os.environ.setdefault(name, value)

from hypothesis import HealthCheck, settings  # noqa: E402  (after the environment)

from verl_rc.distributed.child_process import importing  # noqa: E402
from verl_rc.exact import EXACT_ENVIRONMENT  # noqa: E402

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
IN_ONE_RAY = tuple(
    f"tests/integration/test_{name}.py"
    for name in (
        "adapters_in_a_run",
        "conversation",
        "environment_hosts",
        "local_ray",
        "planted_faults",
        "recovery",
        "remote",
        "reward_model",
        "watchdog",
    )
)
SHARED = {"whole runs": WHOLE_RUNS, "one Ray": IN_ONE_RAY}
"""Tests whose start takes long: those that start the program as a user does share one run's folder; those
with ``ray_here`` or ``faulty_run`` start Ray in their own process, which holds one at a time, so that the run
with faulty workers comes last."""


class WhatIsSharedStaysTogether(LoadScopeScheduling):
    """Distributes files over the processes of pytest-xdist; files that share a start go to one process."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((scope for scope, paths in SHARED.items() if file.startswith(paths)), file)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A Ray that a second process starts would cost seconds that nobody sees."""
    for item in items:
        starts_ray = {"ray_here", "faulty_run"} & set(getattr(item, "fixturenames", ()))
        if starts_ray and not item.nodeid.startswith((*IN_ONE_RAY, "tests/chaos/")):
            raise pytest.UsageError(f"{item.nodeid} starts Ray in this process: add its file to IN_ONE_RAY.")


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
