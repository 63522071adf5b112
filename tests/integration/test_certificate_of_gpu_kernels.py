"""A GPU's side of exact mode as far as a CPU can tell: a real engine, the trainer and single kernels, all in
Triton's interpreter."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.exact import ENGINE_ARGUMENTS, capture
from verl_rc.runtime.exact.captured_trainer import ComparedOperation
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.workers.environment import engine_environment, trainer_environment

PROMPTS = [[5, 6, 7], [3, 1, 4] * 12, [*[3, 1, 4] * 11, 5, 9]]
"""Two share a block of 32 tokens."""
ARGUMENTS = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 4 << 20,
    "block_size": 32,
    "skip_tokenizer_init": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 256,
    "distributed_executor_backend": "uni",
    "compilation_config": ENGINE_ARGUMENTS["cuda"]["compilation_config"],
}


def rows_depend_on_their_place() -> bool:
    """Whether numpy's product, with which Triton's interpreter computes, rounds a row by its place."""
    left, right = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).numpy()
    return not (np.roll(np.roll(left, 5, axis=0) @ right, -5, axis=0) == left @ right).all()


needs_equal_rows = pytest.mark.skipif(
    rows_depend_on_their_place(), reason="numpy's product on this CPU rounds a row by its place in the batch"
)


pytestmark = pytest.mark.slow  # test_certificate.py certifies the kernels of a CPU


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    config = Qwen3Config(
        vocab_size=29,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    options = VllmOptions(str(folder / "model"), "float32", 64, ARGUMENTS)
    environment = engine_environment(1, "cpu", one_node=True)
    engine = ChildProcess("triton_interpreter:Engine", environment, options=options)
    try:
        engine.call("sample", PROMPTS[1:2], 1, str(folder / "engine.pt"))
        assert engine.call("sample", PROMPTS, 3, str(folder / "engine.pt")) == 2 * 32
    finally:
        engine.end()
    return folder


@pytest.fixture(scope="module")
def checks() -> Iterator[ChildProcess]:
    checks = ChildProcess("interpreted_checks:Checks", trainer_environment(1, one_node=True), wait=False)
    yield checks
    checks.end()


@pytest.fixture(scope="module")
def comparisons(checks: ChildProcess, folder: Path) -> list[list[ComparedOperation]]:
    """Of the exact and of the ordinary trainer."""
    checks.answer()
    arguments = str(folder / "model"), PROMPTS, str(folder / "engine.pt")
    return [checks.call("compare", *arguments, exact) for exact in (True, False)]


@needs_equal_rows
def test_engine_and_trainer_compute_the_same_bits(comparisons: list[list[ComparedOperation]]) -> None:
    compared = comparisons[0]
    assert {operation.name for operation in compared} >= {
        f"model.layers.0.{end}" for end in (*capture.CAPTURED_MODULES[1:], "self_attn.k_norm", capture.ROTARY)
    }
    assert {operation.decoding for operation in compared} == {False, True}
    assert not [
        (operation.name, operation.largest_difference) for operation in compared if operation.different_rows
    ]


def test_the_ordinary_trainer_differs_from_the_first_norm_on(
    comparisons: list[list[ComparedOperation]],
) -> None:
    first = next(operation for operation in comparisons[1] if operation.different_rows)
    assert first.name == "model.layers.0.input_layernorm"


@needs_equal_rows
def test_attention_is_that_of_a_float64_loop_alone_in_company_and_decoding(
    comparisons: object, checks: ChildProcess
) -> None:
    attention = checks.call("attention")
    assert attention.pop("error") < 1e-5
    assert attention == {"alone": True, "decoded": True}


def test_layers_are_those_of_the_engine_with_gradients_of_the_trainer(
    comparisons: object, checks: ChildProcess
) -> None:
    layers = checks.call("layers")
    assert layers.pop("frequencies") == "meta"  # where the engine builds its model
    assert layers == {"engine": True, "gradients": True, "norm": True, "sum": True}


@needs_equal_rows
def test_log_probs_of_a_model_do_not_depend_on_the_batch(
    comparisons: object, checks: ChildProcess, tmp_path: Path
) -> None:
    model = checks.call("model", str(tmp_path))
    assert model["alone"]
    assert not model["same"]  # as the ordinary ones to the bit: they would be those
    assert model["error"] < 1e-4
    assert model["gradient error"] < 1e-3
