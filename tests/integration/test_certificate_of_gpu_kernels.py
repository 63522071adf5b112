"""The certificate of a GPU's operations: a real engine and the trainer, both in Triton's interpreter."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl_rc.distributed.child_process import ChildProcess
from verl_rc.exact import ENGINE_ARGUMENTS, capture
from verl_rc.preflight.captured_trainer import Compared
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.workers.environment import engine_environment, trainer_environment

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certified")
    config = Qwen3Config(
        vocab_size=29,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
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
        engine.call("sample", PROMPTS[1:2], 3, str(folder / "engine.pt"))
        assert engine.call("sample", PROMPTS, 3, str(folder / "engine.pt")) == 2 * 32
    finally:
        engine.end()
    return folder


def compare(folder: Path, exact: bool) -> Sequence[Compared]:
    trainer = ChildProcess(
        "triton_interpreter:CapturedTrainer",
        trainer_environment(1, one_node=True),
        model_path=str(folder / "model"),
        dtype="float32",
        exact=exact,
    )
    try:
        compared: Sequence[Compared] = trainer.call("compare", PROMPTS, str(folder / "engine.pt"))
    finally:
        trainer.end()
    return compared


def test_engine_and_trainer_compute_the_same_bits(folder: Path) -> None:
    compared = compare(folder, exact=True)
    assert {one.name for one in compared} >= {
        f"model.layers.1.{end}" for end in (*capture.CAPTURED_MODULES[1:], "self_attn.k_norm", capture.ROTARY)
    }
    assert {one.decodes for one in compared} == {False, True}
    assert not [(one.name, one.largest) for one in compared if one.different]


def test_the_ordinary_trainer_differs_from_the_first_norm_on(folder: Path) -> None:
    first = next(one for one in compare(folder, exact=False) if one.different)
    assert first.name == "model.layers.0.input_layernorm"
