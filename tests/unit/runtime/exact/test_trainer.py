"""The trainer's side of exact mode: the engine's values with gradients of the ordinary operations."""

from pathlib import Path

import pytest
import torch
from small_models import make_tokens, write_small_model
from torch import Tensor, nn

from verl_rc.runtime.exact.trainer import exact_scores
from verl_rc.runtime.workers.forward import ForwardOptions, score_tokens
from verl_rc.runtime.workers.language_model import Products, load_causal_lm
from verl_rc.tensor_ops import ScoreOptions, scores_from_hidden_states

TOKENS = make_tokens([3, 6, 1], [7, 2, 5])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # vLLM's attention has no heads below 16 numbers
    return write_small_model(tmp_path_factory.mktemp("model"), head_dim=32)


def load(folder: Path, exact: bool) -> nn.Module:
    return load_causal_lm(
        str(folder), torch.float32, products=Products(exact_dtype=torch.float32 if exact else None)
    )


def scored(model: nn.Module, packed: bool = True, rows: slice = slice(None)) -> Tensor:
    scores = score_tokens(model, TOKENS[rows], ForwardOptions(0.7, packed), with_entropy=True)
    return scores.log_probs


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_do_not_depend_on_the_batch(folder: Path, packed: bool) -> None:
    model = load(folder, exact=True)
    whole = scored(model)
    assert torch.equal(scored(model, packed), whole)
    for row in range(3):
        assert torch.equal(scored(model, packed, slice(row, row + 1))[0], whole[row])


def test_values_and_gradients_are_close_to_the_ordinary_ones(folder: Path) -> None:
    models = [load(folder, exact) for exact in (True, False)]
    log_probs = [scored(model) for model in models]
    torch.testing.assert_close(*log_probs, rtol=1e-4, atol=1e-5)
    for values in log_probs:
        (values * torch.linspace(-1.0, 1.0, values.numel()).view_as(values)).sum().backward()
    for exact, ordinary in zip(*(model.parameters() for model in models), strict=True):
        assert exact.grad is not None
        torch.testing.assert_close(exact.grad, ordinary.grad, rtol=1e-3, atol=1e-4)


def test_scores_are_a_log_softmax_with_the_ordinary_gradient() -> None:
    hidden, weight, bias = torch.randn(20, 8), torch.randn(11, 8), torch.randn(11)
    tokens, options = torch.randint(0, 11, (20,)), ScoreOptions(0.7, entropies=True)
    parts = []
    for score in (exact_scores, scores_from_hidden_states):
        states = hidden.clone().requires_grad_()
        scores = score(states, weight, tokens, options, bias)
        (scores.log_probs * torch.arange(20.0)).sum().backward()
        parts.append((scores, states.grad))
    (exact, gradient), (ordinary, ordinary_gradient) = parts
    logits = torch.nn.functional.linear(torch.cat([hidden, torch.zeros(12, 8)]), weight, bias)[:20] / 0.7
    assert torch.equal(exact.log_probs, logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0])
    assert torch.equal(exact.entropies, ordinary.entropies)
    assert torch.equal(gradient, ordinary_gradient)


def test_dropout_is_refused(folder: Path) -> None:
    model = load(folder, exact=True).train()
    model.base_model.layers[0].self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"without dropout, got attention_dropout=0\.1"):
        scored(model)
