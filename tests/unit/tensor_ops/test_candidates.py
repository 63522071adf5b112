"""Log-probs of other tokens in a token's place, and the most likely ones: by a log-softmax of all logits."""

import pytest
import torch
from torch import Tensor

from verl_rc.tensor_ops import HiddenStateScores, ScoreOptions, logprobs, scores_from_hidden_states

TOKENS = torch.tensor([0, 3, 6, 2, 2])
CANDIDATES = torch.tensor([[6, 0, 3], [1, 2, 4], [5, 0, 1], [2, 1, 0], [4, 2, 6]])
"""Of a vocabulary of seven; the first, the fourth and the last row have the token itself among them."""
CHUNKS = [1, 15, 21, 35]
"""Elements at a time of the 5 x 7 logits: one token of the vocabulary, three, four, all at once."""


def head() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = [(5, 4), (7, 4), (7,)]
    return [torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_() for size in sizes]


def scores(hidden: Tensor, weight: Tensor, bias: Tensor, options: ScoreOptions) -> HiddenStateScores:
    return scores_from_hidden_states(hidden, weight, TOKENS, options, bias, candidate_ids=CANDIDATES)


@pytest.mark.parametrize("elements", CHUNKS)
@pytest.mark.parametrize("with_entropies", [False, True])
def test_values_and_gradients_are_those_of_all_logits(
    elements: int, with_entropies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    shares = torch.randn(5, 3, dtype=torch.float64)
    leaves = head()
    found = scores(*leaves, ScoreOptions(0.7, entropies=with_entropies))
    assert found.candidate_log_probs is not None
    loss = (shares * found.candidate_log_probs).sum() + (found.log_probs * torch.arange(5.0)).sum()
    loss = loss if found.entropies is None else loss + 0.3 * found.entropies.square().sum()
    own = torch.autograd.grad(loss, leaves)

    plain = torch.log_softmax((leaves[0] @ leaves[1].T + leaves[2]) / 0.7, dim=-1)
    torch.testing.assert_close(
        found.candidate_log_probs, plain.gather(-1, CANDIDATES), rtol=1e-12, atol=1e-12
    )
    entropies = -(plain.exp() * plain).sum(-1)
    loss = (shares * plain.gather(-1, CANDIDATES)).sum()
    loss = loss + (plain.gather(-1, TOKENS[:, None])[:, 0] * torch.arange(5.0)).sum()
    loss = loss + 0.3 * entropies.square().sum() if with_entropies else loss
    for one, other in zip(own, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("elements", CHUNKS)
@pytest.mark.parametrize("width", [1, 3, 7, 9])
def test_the_most_likely_tokens_are_those_of_all_logits(
    elements: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", elements)
    hidden, weight, bias = head()
    found = scores_from_hidden_states(hidden, weight, TOKENS, ScoreOptions(0.7, top_tokens=width), bias)
    assert found.top_ids is not None
    assert found.top_log_probs is not None
    values, ids = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1).topk(min(width, 7), dim=-1)
    assert torch.equal(found.top_ids, ids)
    torch.testing.assert_close(found.top_log_probs, values.detach(), rtol=1e-12, atol=1e-12)
    assert not found.top_log_probs.requires_grad


def test_an_id_that_the_vocabulary_lacks_is_impossible_and_moves_nothing() -> None:
    leaves = head()
    ids = torch.tensor([[0, 7]] * 5)
    found = scores_from_hidden_states(*leaves[:2], TOKENS, ScoreOptions(), leaves[2], candidate_ids=ids)
    assert found.candidate_log_probs is not None
    assert (found.candidate_log_probs[:, 1] == -torch.inf).all()
    known = found.candidate_log_probs[:, 0].sum()
    plain = torch.log_softmax(leaves[0] @ leaves[1].T + leaves[2], dim=-1)[:, 0].sum()
    for one, other in zip(
        torch.autograd.grad(known, leaves), torch.autograd.grad(plain, leaves), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_likely_candidate_has_the_digits_that_16_bits_round_away() -> None:
    """The forward divergence of two policies that agree but for a ten-thousandth: with one token for each
    dimension, the gradient of a hidden state is that of its logits."""
    logits = torch.tensor([[8.0, 0.0, 0.0]], dtype=torch.bfloat16).requires_grad_()
    weight, ids = torch.eye(3, dtype=torch.bfloat16), torch.tensor([[0, 1, 2]])
    found = scores_from_hidden_states(
        logits, weight, ids[0, :1], ScoreOptions(), candidate_ids=ids
    ).candidate_log_probs
    assert found is not None
    teacher = torch.tensor([[0.999, 0.0005, 0.0005]])
    (gradient,) = torch.autograd.grad(-(teacher * found).sum(), logits)
    expected = found.detach().double().exp() - teacher.double()
    torch.testing.assert_close(gradient.double(), expected, rtol=2**-8, atol=0)


def test_candidates_must_stand_beside_tokens() -> None:
    hidden, weight, bias = head()
    with pytest.raises(
        ValueError, match=r"candidate_ids must be \[K, W\] for hidden states \[K, H\]; got \[4, 3\]"
    ):
        scores_from_hidden_states(hidden, weight, TOKENS, ScoreOptions(), bias, candidate_ids=CANDIDATES[:4])
