"""Families whose layers look back within a window or have a state: packed rows are what transformers computes
row by row."""

import re
from pathlib import Path

import pytest
import torch
from families import FAMILIES, LENGTHS, RECURRENT, WINDOW, model_of, tokens
from small_models import small_run_config
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl_rc.runtime.workers import language_model
from verl_rc.runtime.workers.forward import packed_logits
from verl_rc.runtime.workers.language_model import load_causal_lm
from verl_rc.runtime.workers.packing import PackedSequences, PrefixSharing
from verl_rc.runtime.workers.supported_models import unsupported_model


def row_by_row(model: nn.Module) -> Tensor:
    """Logits of all response tokens."""
    batch, logits = tokens(), []
    for row, (prompt, response) in enumerate(LENGTHS):
        ids = torch.cat([batch.prompts[row, 20 - prompt :], batch.responses[row, :response]])
        whole = model(ids[None], use_cache=False).logits[0]  # type: ignore[operator]
        logits.append(whole[prompt - 1 : prompt - 1 + response])
    return torch.cat(logits)


def packed(model: nn.Module, remove_padding: bool, shares: bool) -> Tensor:
    rows = PackedSequences.from_tokens(tokens())
    if shares:
        rows = rows.sharing_prefixes(PrefixSharing())
    inputs, predictors = rows.model_inputs(remove_padding, None)
    return model(**inputs).logits.flatten(0, 1)[predictors.positions]  # type: ignore[no-any-return]


def gradients(model: nn.Module, logits: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits.log_softmax(-1) * weights).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}  # type: ignore[misc]


@pytest.mark.parametrize(("remove_padding", "shares"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT])
def test_packed_rows_are_those_of_transformers(
    family: str, remove_padding: bool, shares: bool, tmp_path: Path
) -> None:
    model_of(family).save_pretrained(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = load_causal_lm(str(tmp_path), torch.float32)
    expected, found = row_by_row(plain), packed(model, remove_padding, shares)
    torch.testing.assert_close(found.log_softmax(-1), expected.log_softmax(-1), rtol=1e-5, atol=2e-5)
    of_plain, of_packed = gradients(plain, expected), gradients(model, found)
    furthest = max(float((of_packed[name] - value).norm() / value.norm()) for name, value in of_plain.items())
    assert furthest < 1e-4


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 96])
def test_another_window_is_seen(window: int, shares: bool, tmp_path: Path) -> None:
    expected = row_by_row(model_of("mistral")).log_softmax(-1)
    model_of("mistral", sliding_window=window).save_pretrained(tmp_path)
    found = packed(load_causal_lm(str(tmp_path), torch.float32), True, shares).log_softmax(-1)
    assert (found - expected).abs().max() > 0.1


@pytest.mark.parametrize("family", RECURRENT)
def test_a_state_that_leaks_into_the_next_row_is_seen(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(language_model, "separate_sequences", lambda model: model)
    expected = row_by_row(model_of(family)).log_softmax(-1)
    model_of(family).save_pretrained(tmp_path)
    found = packed(load_causal_lm(str(tmp_path), torch.float32), True, False).log_softmax(-1)
    assert (found - expected).abs().max() > 0.1


def test_a_row_is_the_same_bits_beside_another_neighbour(tmp_path: Path) -> None:
    model_of("qwen3_5_text").save_pretrained(tmp_path)
    model, ids = load_causal_lm(str(tmp_path), torch.float32), torch.arange(3, 39)
    others = ids.clone()
    others[:20] += 100
    one, other = (packed_logits(model, tokens, [20, 16])[20:] for tokens in (ids, others))
    assert torch.equal(one, other)


ON_CPU = ["actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.enable_prefix_caching=False"]
ULYSSES = [
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
]


@pytest.mark.parametrize(
    ("family", "overrides", "said"),
    [
        ("mistral", [], None),
        ("mistral", ["critic.enable=True"], None),
        ("mistral", ["actor_rollout_ref.exact=True"], "exact mode is not built .* sliding_window=8 .* to 8"),
        ("olmo3", ["critic.enable=True"], "no model of type olmo3 that gives each token a value"),
        ("gemma3_text", ["critic.enable=True"], "choose another critic.model.path"),
        ("gemma3_text", [], None),
        ("gpt_oss", [], None),
        ("gpt_oss", ["actor_rollout_ref.exact=True"], "exact mode does not cover"),
        ("gpt_oss", ULYSSES, "has .* sinks, .* pass actor_.*fsdp_config.ulysses_sequence_parallel_size=1"),
        ("qwen3_next", ON_CPU, None),
        ("qwen3_next", [], "bfloat16 alone on a CPU, got .*dtype=float32: pass .*dtype=bfloat16"),
        ("qwen3_5_text", ON_CPU[:1], "pass actor_rollout_ref.rollout.enable_prefix_caching=False"),
        ("qwen3_next", [*ON_CPU, *ULYSSES], "a recurrent state, .*ulysses_sequence_parallel_size=1"),
        ("qwen3_5_text", ["actor_rollout_ref.exact=True"], "which exact mode does not cover"),
        ("qwen3_5_text", [*ON_CPU, "critic.enable=True"], "no model of type qwen3_5_text"),
        (
            "qwen3_5_text",
            ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=False"],
            "recurrent layers, beside which adapters .*merge=True",
        ),
    ],
)
def test_what_is_refused(family: str, overrides: list[str], said: str | None, tmp_path: Path) -> None:
    model_of(family).config.save_pretrained(tmp_path)
    config = small_run_config(tmp_path, *overrides)
    problem = unsupported_model(config, str(tmp_path), trust_remote_code=False)
    assert problem is None if said is None else re.search(said, problem or "")


@pytest.mark.parametrize(("load_format", "is_refused"), [("auto", False), ("dummy", True)])
def test_buffers_that_no_update_sends_are_read_by_the_engine(
    load_format: str, is_refused: bool, tmp_path: Path
) -> None:
    sizes = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1}
    model_of("glm4_moe", **sizes, topk_group=1, first_k_dense_replace=1).config.save_pretrained(tmp_path)
    config = small_run_config(tmp_path, f"actor_rollout_ref.rollout.load_format={load_format}")
    problem = unsupported_model(config, str(tmp_path), trust_remote_code=False)
    assert (problem is not None) == is_refused
    assert "layers.1.mlp.gate.e_score_correction_bias): pass" in (problem or "") or not is_refused


def test_weights_that_are_stored_quantised_are_refused(tmp_path: Path) -> None:
    """As those of the published gpt-oss are."""
    config = model_of("gpt_oss").config
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.save_pretrained(tmp_path)
    problem = unsupported_model(small_run_config(tmp_path), str(tmp_path), trust_remote_code=False)
    assert problem is not None
    assert "stored quantised (mxfp4)" in problem
