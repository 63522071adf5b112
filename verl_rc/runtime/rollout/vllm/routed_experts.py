"""The calls of vLLM's GPU runner that return each token's experts, for its CPU runner, which lacks them.

vLLM 0.32 records experts, keeps those of cached prefixes beside the cache's blocks, and returns them with a
request.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector, get_aux_output_connector
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from verl_rc.runtime.rollout.vllm.signatures import require_parameters

_execute_model, _sample_tokens = CPUModelRunner.execute_model, CPUModelRunner.sample_tokens
_EXPECTED_PARAMETERS = {
    VllmConfig._verify_aux_output_compatibility: ["self"],
    _execute_model: ["self", "scheduler_output", "intermediate_tensors"],
    _sample_tokens: ["self", "grammar_output"],
    get_aux_output_connector: ["model", "vllm_config", "kv_cache_config"],
    AuxOutputWorkerConnector.begin_step: ["self", "metadata"],
    AuxOutputWorkerConnector.prepare_output: ["self", "input_batch"],
}
"""The functions that are replaced or called, with their parameters."""


def return_experts_on_a_cpu() -> None:
    """Let vLLM return experts on a CPU when ``enable_return_routed_experts`` is set.

    Raises ``RuntimeError`` when vLLM's functions have changed.
    """
    for function, expected in _EXPECTED_PARAMETERS.items():
        require_parameters(function, expected, "records experts on a CPU")
    # The check demands the GPU runner.
    VllmConfig._verify_aux_output_compatibility = lambda _: None
    CPUModelRunner.execute_model = _execute_and_record
    CPUModelRunner.sample_tokens = _sample_and_return


def _execute_and_record(runner: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
    if not runner.vllm_config.aux_output_config.enabled:
        return _execute_model(runner, scheduler_output, intermediate_tensors)
    if not hasattr(runner, "expert_records"):
        runner.expert_records = get_aux_output_connector(
            runner.model, runner.vllm_config, runner.kv_cache_config
        )
    runner.expert_records.begin_step(scheduler_output.aux_output_connector_metadata)
    result = _execute_model(runner, scheduler_output, intermediate_tensors)
    runner.experts_of_step = None
    if scheduler_output.total_num_scheduled_tokens:
        batch = runner.input_batch
        counts = [scheduler_output.num_scheduled_tokens[name] for name in batch.req_ids]
        rows = SimpleNamespace(
            req_ids=batch.req_ids,
            query_start_loc_np=np.cumsum([0, *counts]),
            num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(counts)].copy(),
        )
        runner.experts_of_step = runner.expert_records.prepare_output(rows)
    return result


def _sample_and_return(runner: Any, grammar_output: Any) -> Any:
    output = _sample_tokens(runner, grammar_output)
    experts = getattr(runner, "experts_of_step", None)
    if experts is not None:
        num_sampled = np.array([len(token_ids) for token_ids in output.sampled_token_ids])
        experts.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
        output.aux_output_connector_output = experts.process_output()
        runner.experts_of_step = None
    return output
