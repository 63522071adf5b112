"""The number of an engine's workers on a node, for vLLM's queues between nodes."""

from typing import Any

from vllm.platforms.interface import set_assigned_physical_gpu_ids
from vllm.v1.executor.multiproc_executor import WorkerProc

from verl_rc.runtime.rollout.vllm.signatures import require_parameters

_init_message_queues = WorkerProc._init_message_queues


def count_workers_of_node() -> None:
    """Let vLLM 0.32 find the workers on a node of CPUs, where it counts one device.

    By that number it decides which workers share memory. Raises ``RuntimeError`` when vLLM's function has
    changed.
    """
    parameters = ["self", "input_shm_handle", "vllm_config"]
    require_parameters(_init_message_queues, parameters, "connects workers of a node")
    WorkerProc._init_message_queues = _connect


def _connect(worker: Any, input_shm_handle: Any, vllm_config: Any) -> None:
    set_assigned_physical_gpu_ids(list(range(vllm_config.parallel_config.local_world_size)))
    _init_message_queues(worker, input_shm_handle, vllm_config)
