"""The parts of an engine on two nodes, without Ray: two workers on each sample as four on one node, with the
same experts."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from small_engines import ARGUMENTS
from small_models import small_experts
from transformers import PreTrainedModel, Qwen3MoeForCausalLM
from two_processes import free_port

from verl_rc.records.parts import Sample, token_ids
from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.workers.environment import LOOPBACK, engine_environment

pytestmark = pytest.mark.slow
SAMPLING = SamplingOptions(1.0, 1.0, -1, 16, stop_token_ids=(), ignore_eos=True, records_experts=True)
REQUESTS = [
    GenerationRequest([3 + (7 * row + 5 * place) % 250 for place in range(40)], row) for row in range(8)
]
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 128, "moe_intermediate_size": 128}


@contextmanager
def engine_on(nodes: int, model: Path) -> Iterator[ChildProcess]:
    """The process of an engine that answers."""
    arguments = {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}
    arguments |= {**ARGUMENTS, "enable_return_routed_experts": True}
    options = VllmOptions(str(model), "float32", 96, arguments)
    parts = options.on_nodes(nodes, LOOPBACK, free_port()) if nodes > 1 else [options]
    environment = engine_environment(num_threads=1, device="cpu", one_node=True)
    processes = []
    try:
        for target, part in zip(["loaded_engine:LoadedEngine", options.further_worker], parts, strict=False):
            processes.append(ChildProcess(target, environment, wait=False, options=part))
        for process in processes:
            process.answer()
        for process in processes[1:]:
            process.ask("serve")
        yield processes[0]
    finally:
        for process in processes:
            process.kill()


def samples_on(nodes: int, model: PreTrainedModel, folder: Path) -> list[Sample]:
    """Sampled with weights that came by an update."""
    with engine_on(nodes, folder) as engine:
        receipts = engine.call("load", model.state_dict(), 1, "float32")
        assert [(one.not_loaded, one.unread) for one in receipts] == [([], [])] * 4
        assert len(engine.call("device_keys")) == 4
        samples: list[Sample] = engine.call("generate", REQUESTS, SAMPLING)
    return samples


def test_two_nodes_sample_as_one(tmp_path: Path) -> None:
    model = small_experts(Qwen3MoeForCausalLM, 258, **SIZES)
    model.save_pretrained(tmp_path)
    one, two = (samples_on(nodes, model, tmp_path) for nodes in (1, 2))
    assert [token_ids(sample.parts) for sample in one] == [token_ids(sample.parts) for sample in two]
    for expected, sample in zip(one, two, strict=True):
        (wanted,), (part,) = expected.parts, sample.parts
        torch.testing.assert_close(part.log_probs, wanted.log_probs, rtol=0, atol=1e-5)
        assert (part.columns["experts"].values == wanted.columns["experts"].values).all()
