"""Settings that every test process shares; they must be in the environment before torch, Ray or wandb load."""

import os

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

from hypothesis import settings  # noqa: E402  (after the environment)

settings.register_profile("verl_rc", deadline=None)  # a busy machine is no defect of the code under test
settings.load_profile("verl_rc")
