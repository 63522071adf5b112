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

SHARED = {
    "whole runs": ("tests/chaos/", "tests/integration/test_resume.py", "tests/integration/test_two_steps.py"),
    "one Ray": tuple(
        f"tests/integration/test_{name}.py"
        for name in ("agent_loop", "local_ray", "planted_faults", "recovery", "remote", "reward_model", "watchdog")
    ),
}
"""Files whose tests share what takes long to start: the folder of one run, or the Ray of their process, which holds one."""


class WhatIsSharedStaysTogether(LoadScopeScheduling):
    """Who runs what where pytest-xdist shares tests out: file by file, but for those that share a start."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return next((scope for scope, paths in SHARED.items() if file.startswith(paths)), file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return WhatIsSharedStaysTogether(config, log)
