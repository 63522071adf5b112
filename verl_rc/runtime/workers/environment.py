"""Environment variables of the processes of a run; they are set before torch or vllm is imported."""

import os
from collections.abc import Mapping

from verl_rc.runtime.exact import summation_order

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}

SLEEP_WHILE_WAITING = {"OMP_WAIT_POLICY": "passive"}
"""OpenMP threads sleep while they wait: on a busy CPU, spinning threads make a step ten times slower."""

_VLLM = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_BATCH_INVARIANT": "0",
}
"""Variables of engines on every node; values that the user sets for the driver take precedence."""

_NCCL = {"NCCL_CUMEM_ENABLE": "0"}
"""vLLM switches this off in its workers. The trainer must switch it off too, or a weight transfer hangs."""

LOOPBACK = "127.0.0.1"
_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
"""Variables that let gloo and vLLM connect over the loopback interface, on one node."""


def trainer_environment(num_threads: int, one_node: bool) -> dict[str, str]:
    """Environment of a trainer rank that computes with ``num_threads`` threads."""
    return {**_QUIET, **_threads(num_threads), **_overridable(_NCCL), **(_ON_LOOPBACK if one_node else {})}


def _threads(count: int) -> dict[str, str]:
    # In exact mode all nodes choose the kernels of a sum alike.
    return {"OMP_NUM_THREADS": str(count), **_overridable(SLEEP_WHILE_WAITING), **summation_order()}


def _overridable(defaults: Mapping[str, str]) -> dict[str, str]:
    """The ``defaults``, with the values of this process's environment where it has them."""
    return {name: os.environ.get(name, value) for name, value in defaults.items()}


def engine_environment(num_threads: int, device: str, one_node: bool) -> dict[str, str]:
    """Environment of an engine's process.

    The engine core stays in the actor's process, where no child can be orphaned. On a CPU no core is pinned,
    because two engines would pin the same cores, and dynamo is off, because it would compile for seconds what
    an eager engine runs once.
    """
    variables = {
        **_QUIET,
        **_threads(num_threads),
        **_overridable(_NCCL),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **_overridable(_VLLM),
    }
    if device == "cpu":
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    return variables | (_ON_LOOPBACK if one_node else {})
