"""Scores over the support that a filter left: by a float64 loop, by finite differences, in any chunks."""

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.tensor_ops import ScoreOptions, logprobs, scores_from_hidden_states

SETS = [[0, 2, 5], [3], [], [6, 2], [0, 1, 2, 3, 4, 5, 6]]
"""Tokens that were left at five positions, of a vocabulary of seven; none at the third, all at the last."""
TOKENS = torch.tensor([0, 3, 6, 2, 2])
EVERYTHING = ScoreOptions(0.7, entropies=True, sum_pi_squared=True)
CHUNKS = [1, 15, 21, 35]
"""Elements at a time of the 5 x 7 logits: one token of the vocabulary, three, four, all at once."""


def support_ids(width: int = 7) -> Tensor:
    return torch.tensor([[*support, *[-1] * (width - len(support))] for support in SETS])


def head() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(5, 4), (7, 4), (7,)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("elements", CHUNKS)
def test_values_are_those_of_the_distribution_over_the_support(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    hidden, weight, bias = head()
    scores = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias, support_ids())
    plain = (hidden @ weight.T + bias).detach()
    for place, (support, token) in enumerate(zip(SETS, TOKENS.tolist(), strict=True)):
        logits = {candidate: float(plain[place, candidate]) / 0.7 for candidate in support or range(7)}
        total = sum(map(math.exp, logits.values()))
        table = {candidate: logit - math.log(total) for candidate, logit in logits.items()}
        entropy = -sum(math.exp(value) * value for value in table.values())
        squares = sum(math.exp(2 * value) for value in table.values())
        spread = sum(math.exp(value) * (value + entropy) ** 2 for value in table.values())
        values = [column[place].item() for column in scores if column is not None]
        assert values == pytest.approx([table[token], entropy, squares, spread], rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("elements", CHUNKS)
def test_gradients_are_those_of_finite_differences_and_flow_through_support_alone(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    options = ScoreOptions(0.7, entropies=True)

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return scores_from_hidden_states(hidden, weight, TOKENS, options, bias, support_ids())[:2]

    assert torch.autograd.gradcheck(both, head())
    # With one token for each dimension, the gradient of a hidden state is that of its logits.
    logits, weight = (
        torch.randn(5, 7, dtype=torch.float64).requires_grad_(),
        torch.eye(7, dtype=torch.float64),
    )
    scores = scores_from_hidden_states(logits, weight, TOKENS, options, support_ids=support_ids())
    (scores.log_probs.sum() + scores.entropies.sum()).backward()  # type: ignore[union-attr]
    assert logits.grad is not None
    for place, support in enumerate(SETS):
        tokens = logits.grad[place].nonzero()[:, 0].tolist()
        assert tokens == (
            sorted(support or range(7)) if len(support) != 1 else []
        )  # one token alone is certain


def test_padding_of_the_sets_changes_nothing_and_sets_of_all_tokens_are_no_filter() -> None:
    hidden, weight, bias = head()
    narrow = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias, support_ids())
    wide = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias, support_ids(12))
    plain = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias)
    none = scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias, torch.full((5, 1), -1))
    for filtered, padded, unfiltered, unrecorded in zip(narrow, wide, plain, none, strict=True):
        if filtered is None:  # not asked for
            continue
        assert torch.equal(filtered, padded)
        assert torch.equal(filtered[[2, 4]], unfiltered[[2, 4]])
        assert torch.equal(unrecorded, unfiltered)


def test_a_token_outside_the_support_has_no_probability_and_wrong_shapes_are_named() -> None:
    hidden, weight, bias = head()
    tokens = torch.tensor([1, 3, 6, 2, 2])
    scores = scores_from_hidden_states(hidden, weight, tokens, EVERYTHING, bias, support_ids())
    assert torch.isneginf(scores.log_probs).tolist() == [True, False, False, False, False]
    with pytest.raises(ValueError, match=r"support_ids must be \[K, W\]"):
        scores_from_hidden_states(hidden, weight, TOKENS, EVERYTHING, bias, support_ids()[:4])


def test_no_hidden_host_sync() -> None:
    with FakeTensorMode():
        hidden, weight = torch.empty(5, 4, requires_grad=True), torch.empty(7, 4, requires_grad=True)
        ids = torch.zeros(5, dtype=torch.int64), torch.zeros(5, 3, dtype=torch.int64)
        scores = scores_from_hidden_states(hidden, weight, ids[0], EVERYTHING, support_ids=ids[1])
        scores.log_probs.sum().backward()
