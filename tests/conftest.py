"""Settings that every test process shares; they must be in the environment before torch, Ray or wandb load."""

import os
from pathlib import Path

import pytest

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

REAL_RUNS = [Path(__file__).parent / name for name in ("integration", "chaos")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who runs what where two processes share the tests (pytest-xdist): one all real runs, else whole files."""
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            is_real = any(folder in item.path.parents for folder in REAL_RUNS)
            item.add_marker(pytest.mark.xdist_group("real_runs" if is_real else item.path.stem))
