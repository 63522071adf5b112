"""vLLM's ``LLM``, from the options of an engine."""

from typing import Any

from vllm import LLM

from verl_rc.runtime.exact.operations import device_module
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.process_cleanup import unlink_shared_memory


def build_llm(options: VllmOptions, **further: Any) -> LLM:
    """Build the engine with ``further`` keyword arguments.

    Raises ``InexactError`` when this vLLM does not support exact mode.
    """
    return LLM(**engine_arguments(options, **further))


def engine_arguments(options: VllmOptions, **further: Any) -> dict[str, Any]:
    """Arguments of vLLM on a node of the engine. Raises like ``build_llm``."""
    exact = device_module("engine").use_trainer_operations() if options.exact else {}
    node = options.node
    place: dict[str, Any] = {}
    if node is not None:
        place = {"nnodes": node.count, "node_rank": node.number}
        place |= {"master_addr": node.host, "master_port": node.port}
    return {
        "model": options.model_path,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "disable_log_stats": True,
        **further,
        **options.arguments,
        **exact,
        **place,
    }


def release_shared_memory(llm: LLM) -> None:
    """Unlink what the processes of an engine with ``engine_worker.EXTENSION`` share: once it is built, all of
    them have mapped it."""
    llm.collective_rpc("unlink_shared_memory")
    unlink_shared_memory()
