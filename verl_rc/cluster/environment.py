"""Environment variables of all processes: those that Ray reads on import, and those that engines and trainers need before
they import torch."""

import os
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).absolute().parents[2]

# Ray 2.60 would otherwise write a token file into the home folder, phone home, and hide GPUs from actors that
# reserve none.
_RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_open_telemetry": "0",
    "RAY_DEDUP_LOGS": "0",
}

# A Ray that is started here would otherwise give its workers nice 15, with which they get 3 % of a core beside one busy
# program, and wait no longer than 30 s for its servers and 60 s for a worker, which a busy machine may take. (Not much longer
# for the raylet: if it is not there after 60 s, it has ended, see ``ray_session``.)
_LOCAL_RAY = {
    "RAY_worker_niceness": "0",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_raylet_start_wait_time_s": "60",
    "RAY_worker_register_timeout_seconds": "300",
}

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}

_SLEEP_WHILE_WAITING = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads sleep while they wait: on a busy CPU, spinning threads make a step ten times slower."""

_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
"""On one node, gloo and vLLM connect over the loopback interface."""


def prepare_driver() -> None:
    """Set the variables that ``import ray`` reads; the user's values take precedence."""
    quiet = {"TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}
    for name, value in {**_RAY, **_LOCAL_RAY, **quiet, **_SLEEP_WHILE_WAITING}.items():
        os.environ.setdefault(name, value)


def python_path() -> str:
    """``PYTHONPATH`` of processes, with the folder of this package first, so that they import the same code."""
    return os.pathsep.join(part for part in (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")) if part)


def trainer_environment(num_threads: int, one_node: bool) -> dict[str, str]:
    """Environment of a trainer rank that computes with ``num_threads`` threads."""
    return {**_QUIET, **_threads(num_threads), **(_ON_LOOPBACK if one_node else {})}


def _threads(count: int) -> dict[str, str]:
    waiting = {name: os.environ.get(name, value) for name, value in _SLEEP_WHILE_WAITING.items()}
    return {"OMP_NUM_THREADS": str(count), **waiting}


def engine_environment(num_threads: int, device: str, one_node: bool) -> dict[str, str]:
    """Environment of an engine's process.

    The engine core stays in the actor's process (no child to orphan). On a CPU: no core pinning (two engines would
    pin the same cores), and no dynamo, which would compile for seconds what an eager engine runs once.
    """
    variables = {
        **_QUIET,
        **_threads(num_threads),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
    }
    if device == "cpu":
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return variables | (_ON_LOOPBACK if one_node else {})
