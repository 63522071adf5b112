"""The forward pass that ends in scores: the plain model's scores and gradients; models with other output
layers are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import VOCABULARY, make_tokens, small_model_config
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.modeling_outputs import CausalLMOutput

from verl_rc.config.models import ModelConfig
from verl_rc.runtime.workers.forward import ForwardOptions, packed_logits, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm
from verl_rc.runtime.workers.lora import adapters_off, add_adapters
from verl_rc.runtime.workers.packing import PackedSequences
from verl_rc.runtime.workers.scoring_head import add_scoring
from verl_rc.tensor_ops import logprobs

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
TOKENS = make_tokens([1, 6, 3, 4], [7, 2, 0, 5])


def write(config: PreTrainedConfig, folder: Path) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # transformers starts them at 0
            nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return str(folder)


def unfused_scores(model: nn.Module, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the response tokens with all logits at once, ``[K]``."""
    packed = PackedSequences.from_tokens(TOKENS)
    logits = packed_logits(model, packed.token_ids, packed.lengths, keep=packed.predictors)
    table = (logits / temperature).log_softmax(-1)
    targets = TOKENS.responses[packed.is_response]
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    fused, whole = (torch.cat([part[name].flatten() for name in expected]) for part in (found, expected))
    assert whole.norm() > 0
    assert float((fused - whole).norm() / whole.norm()) <= 4e-6  # some 30 roundings: CPUs add in other orders


@pytest.mark.parametrize("elements", [60, 1 << 20], ids=["chunks", "at once"])
@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        small_model_config(VOCABULARY, tie_word_embeddings=False),
        Qwen2Config(**SIZES, tie_word_embeddings=True),
        GraniteConfig(**SIZES, logits_scaling=8.0),
        CohereConfig(**SIZES, logit_scale=0.25),
        PhiConfig(**SIZES),
    ],
    ids=["plain", "tied", "divided", "multiplied and tied", "with bias"],
)
def test_scores_and_gradients_equal_those_of_all_logits_at_once(
    config: PreTrainedConfig,
    remove_padding: bool,
    elements: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = load_causal_lm(write(config, tmp_path), torch.float32)
    log_probs, entropies = unfused_scores(model, 0.7)
    expected = gradients(model, log_probs.sum() + 0.3 * entropies.sum())
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    scores = score_tokens(model, TOKENS, ForwardOptions(0.7, remove_padding), with_entropy=True)
    assert scores.entropies is not None
    at = PackedSequences.from_tokens(TOKENS).is_response
    torch.testing.assert_close(scores.log_probs[at], log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(scores.entropies[at], entropies, atol=1e-5, rtol=1e-5)
    found = gradients(model, scores.log_probs.sum() + 0.3 * scores.entropies.sum())
    assert found.keys() == {name for name, _ in model.named_parameters()}
    assert_same_gradients(found, expected)


def test_with_adapters_the_adapters_learn_and_without_them_it_is_the_base_model(model_folder: Path) -> None:
    model = add_adapters(load_causal_lm(str(model_folder), torch.float32), ModelConfig(path="m", lora_rank=2))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    expected = gradients(model, unfused_scores(model, 1.0)[0].sum())
    found = gradients(
        model, score_tokens(model, TOKENS, ForwardOptions(1.0), with_entropy=False).log_probs.sum()
    )
    assert all(".lora_" in name for name in found)
    assert_same_gradients(found, expected)
    with torch.no_grad(), adapters_off(model):
        without = score_tokens(model, TOKENS, ForwardOptions(1.0), with_entropy=False).log_probs
        base = load_causal_lm(str(model_folder), torch.float32)
        assert torch.equal(
            without, score_tokens(base, TOKENS, ForwardOptions(1.0), with_entropy=False).log_probs
        )


def test_a_head_in_float32_takes_weights_and_states_as_they_are(model_folder: Path) -> None:
    """bfloat16 everywhere else: products in float64 of the same numbers."""
    model = load_causal_lm(str(model_folder), torch.bfloat16, products=Products("float32"))
    found = score_tokens(model, TOKENS, ForwardOptions(0.7), with_entropy=False).log_probs
    assert found.dtype == torch.float32
    plain = load_causal_lm(str(model_folder), torch.bfloat16)
    rounded = score_tokens(plain, TOKENS, ForwardOptions(0.7), with_entropy=False).log_probs
    head = plain.get_submodule("lm_head")
    head.forward = lambda states: F.linear(states.double(), head.weight.double())  # type: ignore[method-assign]
    expected = unfused_scores(plain, 0.7)[0]
    at = PackedSequences.from_tokens(TOKENS).is_response
    torch.testing.assert_close(found[at].double(), expected.double(), atol=1e-5, rtol=1e-5)
    assert float((rounded[at] - expected).detach().abs().max()) > 1e-3
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_soft_caps_are_refused_by_name(tmp_path: Path) -> None:
    folder = write(Gemma2Config(**SIZES, head_dim=8), tmp_path)
    with pytest.raises(
        ValueError, match=r"Gemma2ForCausalLM changes them .*'final_logit_softcapping': 30\.0"
    ):
        load_causal_lm(folder, torch.float32)


class HeadAfterNorm(Qwen2ForCausalLM):
    def forward(self, **inputs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(**inputs).last_hidden_state / 2))


class SquaredLogits(Qwen2ForCausalLM):
    def forward(self, **inputs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=super().forward(**inputs).logits.square())


class HeadOfTwoLayers(Qwen2ForCausalLM):
    def get_output_embeddings(self) -> nn.Module:
        return nn.Sequential(self.lm_head, nn.Tanh())


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HeadAfterNorm, "HeadAfterNorm changes them in another way"),
        (SquaredLogits, "SquaredLogits changes them in another way"),
        (HeadOfTwoLayers, "HeadOfTwoLayers has the output layer Sequential"),
    ],
)
def test_other_ways_to_logits_are_refused(kind: type[Qwen2ForCausalLM], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        add_scoring(kind(small_model_config(VOCABULARY)))


def test_the_probe_leaves_the_model_as_it_was(model_folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    expected = plain(TOKENS.prompts).logits
    assert torch.equal(add_scoring(plain)(TOKENS.prompts).logits, expected)


@pytest.mark.parametrize("given", [{"target_modules": ["q_proj", "lm_head"]}])
def test_adapters_of_the_output_layer_are_refused(given: dict[str, list[str]], model_folder: Path) -> None:
    model = load_causal_lm(str(model_folder), torch.float32)
    with pytest.raises(ValueError, match=r"target_modules must leave the output layer out, got .*lm_head"):
        add_adapters(model, ModelConfig.model_validate({"path": "m", "lora_rank": 2, **given}))
