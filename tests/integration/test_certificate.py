"""The certificate of exact mode with a real engine: all is equal, and a planted rounding is located."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import write_tiny_model
from torch import Tensor, nn
from transformers import AutoConfig, GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from verl_rc.runtime.distributed.child_process import ChildProcess
from verl_rc.runtime.distributed.process_group import leave_trainer_group
from verl_rc.runtime.exact import cpu_kernels
from verl_rc.runtime.exact.captured_trainer import CapturedTrainer, ComparedOperation
from verl_rc.runtime.exact.certificate import certify
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.workers.environment import engine_environment

PROMPTS = [[1 + (7 * row + 3 * place) % 27 for place in range(2 + row % 5)] for row in range(7)]
ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 32 << 20,
    "skip_tokenizer_init": True,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 4096,
}
DTYPE = "bfloat16"
MODEL: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # vLLM has no smaller heads
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
Compare = Callable[[], list[ComparedOperation]]


@pytest.fixture(scope="module")
def trainer_and_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[CapturedTrainer, Path]]:
    """A trainer, and what an engine with its weights computed."""
    folder = tmp_path_factory.mktemp("exact")
    model, file = str(folder / "model"), folder / "engine.pt"
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**MODEL)).save_pretrained(model)
    options = VllmOptions(model, DTYPE, 64, ARGUMENTS, exact=True)
    environment = engine_environment(num_threads=1, device="cpu", one_node=True)
    engine = ChildProcess(
        "verl_rc.runtime.exact.captured_engine:CapturingEngine", environment, options=options
    )
    engine.call("sample", PROMPTS, 5, str(file))
    engine.end()
    yield CapturedTrainer(model, DTYPE, exact=True), file
    leave_trainer_group()


@pytest.fixture
def trainer(trainer_and_file: tuple[CapturedTrainer, Path]) -> CapturedTrainer:
    return trainer_and_file[0]


@pytest.fixture
def compare(trainer_and_file: tuple[CapturedTrainer, Path]) -> Compare:
    trainer, file = trainer_and_file
    return lambda: trainer.compare(PROMPTS, str(file))


def rounded(values: Any) -> Any:
    """Without the last three bits."""
    if isinstance(values, tuple):
        return (*map(rounded, values),)
    whole = {2: torch.int16, 4: torch.int32}[values.dtype.itemsize]
    return (values.view(whole) & ~7).view(values.dtype)


def first_of(compared: list[ComparedOperation]) -> str:
    return next((operation.name for operation in compared if operation.different_rows), "none")


def test_every_operation_of_both_phases_is_equal(compare: Compare) -> None:
    compared = compare()
    assert first_of(compared) == "none"
    places = sum(len(prompt) for prompt in PROMPTS)
    by_phase = {
        decodes: {operation.name for operation in compared if operation.decoding == decodes}
        for decodes in (False, True)
    }
    # of 2 layers: 4 norms, the sums of two of them but for the first, 4 linear, rotary, attention, activation
    assert len(by_phase[False]) == 2 * 13 - 1 + len(("embedding", "sum", "norm", "logits", "log-probs"))
    assert by_phase[True] == by_phase[False]
    assert {operation.rows for operation in compared if operation.name == "model.norm"} == {
        places,
        4 * len(PROMPTS),
    }


PLANTED = [
    ("model.embed_tokens", "model.embed_tokens"),
    ("model.layers.1.input_layernorm", "model.layers.1.input_layernorm"),
    ("model.layers.1.self_attn.k_proj", "model.layers.1.self_attn.qkv_proj"),
    ("model.rotary_emb", "model.layers.0.self_attn.rotary_emb"),
    ("model.layers.1.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
    ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_up_proj"),
    ("model.layers.1.mlp.act_fn", "model.layers.1.mlp.act_fn"),
    ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"),
    ("model.layers.0", "model.layers.1.input_layernorm.residual"),
    ("lm_head", "logits"),
]


@pytest.mark.parametrize(("module", "located"), PLANTED, ids=[module for module, _ in PLANTED])
def test_a_planted_rounding_of_a_module_is_located(
    module: str, located: str, trainer: CapturedTrainer, compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner: nn.Module = trainer.model.get_submodule(module)
    forward = owner.forward
    monkeypatch.setattr(owner, "forward", lambda *inputs, **options: rounded(forward(*inputs, **options)))
    compared = compare()
    assert first_of(compared) == located
    worst = next(operation for operation in compared if operation.different_rows)
    assert worst.largest_difference > 0
    assert worst.first_difference is not None


def test_a_planted_rounding_of_attention_is_located(
    compare: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = cpu_kernels.attend
    monkeypatch.setattr(cpu_kernels, "attend", lambda *inputs: rounded(attend(*inputs)))
    assert first_of(compare()) == "model.layers.0.self_attn.attn"


@pytest.mark.parametrize("wrong", [rounded, lambda values: values * torch.nan], ids=["rounding", "NaN"])
def test_planted_log_probs_are_located(
    wrong: Callable[[Tensor], Tensor],
    trainer: CapturedTrainer,
    compare: Compare,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward: Any = trainer.model.forward

    def planted(*inputs: Any, **options: Any) -> Any:
        scores = forward(*inputs, **options)
        return scores._replace(log_probs=wrong(scores.log_probs)) if "predicted" in options else scores

    monkeypatch.setattr(trainer.model, "forward", planted)
    assert first_of(compare()) == "log_probs"


@pytest.mark.slow
def test_prompts_of_a_file_are_certified_for_gemma_in_float32(tmp_path: Path) -> None:
    """Its embedding has a factor, its layers share one activation, and 48 numbers are no whole vectors."""
    model = write_tiny_model(tmp_path / "model")  # for its tokenizer
    tokenizer_size = AutoConfig.from_pretrained(model).vocab_size
    torch.manual_seed(0)
    config = GemmaConfig(**MODEL | {"vocab_size": tokenizer_size, "max_position_embeddings": 512})
    GemmaForCausalLM(config).save_pretrained(model)
    (tmp_path / "prompts.txt").write_text("sort 3 1 2\n\nsort 9 8\n")
    certificate = certify(str(model), "float32", tmp_path / "prompts.txt")
    assert certificate.is_exact, [*certificate.lines()]
    for compared in certificate.operations.values():
        names = {operation.name for operation in compared}
        assert {"model.embed_tokens", "model.layers.0.mlp.act_fn", "model.layers.1.mlp.act_fn"} <= names
