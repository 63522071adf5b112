"""A real engine with fp8 weights on a CPU where PyTorch's choice of a kernel would take hours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.workers.environment import engine_environment

ARGUMENTS = {
    "quantization": "fp8_per_channel",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "block_size": 32,
    "skip_tokenizer_init": True,
}


@pytest.fixture(scope="module")
def engine(task: dict[str, Path]) -> Iterator[ChildProcess]:
    options = VllmOptions(str(task["model"]), "bfloat16", max_model_len=96, arguments=ARGUMENTS)
    environment = engine_environment(1, "cpu", one_node=True)
    process = ChildProcess("slow_fp8_engine:SlowFp8Engine", environment, options=options)
    yield process
    process.end()


def test_it_takes_the_fast_way_with_the_same_numbers(engine: ChildProcess) -> None:
    assert engine.call("facts").measured["fp8 products"].startswith("PyTorch's emulation (")
    requests = [GenerationRequest(prompt_token_ids=list(range(3, 15)), seed=seed) for seed in range(8)]
    sampling = SamplingOptions(1.0, top_p=1.0, top_k=-1, max_tokens=12, stop_token_ids=(), ignore_eos=True)
    log_probs, slow_products = engine.call("log_probs", requests, sampling)
    assert slow_products == 0
    engine.call("become_fast")
    assert log_probs.equal(engine.call("log_probs", requests, sampling)[0])
    assert (log_probs < 0).all()


def test_an_update_must_fill_what_a_checkpoint_fills(engine: ChildProcess) -> None:
    """C3: not the scales that quantisation derives, also those with another name: a block's is
    ``weight_scale_inv``."""
    engine.call("rename_scales", "weight_scale_inv")
    engine.call("begin_update")
    (receipt,) = engine.call("finish_update", 1)
    expected = receipt.not_loaded  # nothing was loaded
    assert "model.layers.0.self_attn.qkv_proj.weight" in expected
    assert "model.embed_tokens.weight" in expected
    assert not [name for name in expected if "scale" in name]
