"""Score centering on policies over few tokens, all of which are listed: the drift of the expected update."""

import pytest
import torch
from torch import Tensor

from verl_rc.algorithm.losses import (
    Aggregation,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    resolve_policy_loss,
)
from verl_rc.algorithm.losses.centering import SamplerHead, centering_term
from verl_rc.config.algorithms import POLICY_LOSSES, LossOptions
from verl_rc.config.rejection_rules import Threshold

V = 9
PER_TOKEN = [
    name
    for name, spec in POLICY_LOSSES.items()
    if spec.ratio in ("token", "penalty", "none") and not spec.is_per_row and not spec.reads_mini_batch
]
GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(V, generator=GENERATOR, dtype=torch.float64)
Q = (LOGITS + 0.7 * torch.randn(V, generator=GENERATOR, dtype=torch.float64)).log_softmax(0)
BAND, TRUNCATED = Threshold(5.0, lower=0.5), Threshold(upper=1.5)


def weights_of(log_ratios: Tensor, bounds: Threshold) -> Tensor:
    raw = log_ratios.exp()
    if bounds.lower is None:
        return raw.clamp(max=bounds.upper)
    return raw.where((raw >= bounds.lower) & (raw <= bounds.upper), 0)


def drift(
    loss: str,
    advantage: float,
    top_k: int | None,
    *,
    in_bypass: bool = True,
    weights: Threshold | None = None,
    tail: bool = True,
    penalty: float = 0.0,
) -> Tensor:
    """The expected gradient of the logits, [V], over tokens from the sampler, all with one advantage; without
    centering where ``top_k`` is None."""
    total = torch.zeros(V, dtype=torch.float64)
    parameters = LossOptions(dro_beta=penalty or None, kl_tau=penalty)
    ids = Q.topk(top_k or 1).indices
    for token in range(V):
        logits = LOGITS.clone().requires_grad_()
        p = logits.log_softmax(0)
        old = Q if in_bypass else p.detach()
        w = None if weights is None else weights_of(p.detach() - Q, weights)
        one = torch.ones(1, 1, dtype=torch.bool)
        inputs = clean_policy_loss_inputs(
            PolicyLossInputs(
                ratio_denominator=old[token].view(1, 1),
                log_probs=p[token].view(1, 1),
                advantages=torch.full((1, 1), advantage, dtype=torch.float64),
                loss_mask=one,
                response_mask=one,
                denominator_mask=one,
                rollout_is_weights=None if w is None else w[token].view(1, 1),
                parameters=parameters,
                aggregation=Aggregation("token-mean", num_tokens=1, num_sequences=1),
            )
        )
        function = resolve_policy_loss(loss)
        value, _ = function(inputs)
        if top_k is not None:
            head = SamplerHead(Q[ids].view(1, 1, -1), p[ids].view(1, 1, -1))
            head = head.with_tail() if tail else head
            of_head = None if weights is None else weights_of(head.log_ratios, weights)
            term, _ = centering_term(function, inputs, head, divides_by_rollout=in_bypass, weights=of_head)
            value = value + term
        (gradient,) = torch.autograd.grad(value, logits)
        total += Q[token].exp() * gradient
    return total


@pytest.mark.parametrize("weights", [None, TRUNCATED, BAND], ids=["unweighted", "truncated", "band"])
@pytest.mark.parametrize("in_bypass", [False, True])
@pytest.mark.parametrize("advantage", [-1.3, 0.8])
@pytest.mark.parametrize("loss", [name for name in PER_TOKEN if name != "dro"])
def test_over_the_whole_vocabulary_the_drift_is_0(
    loss: str, advantage: float, in_bypass: bool, weights: Threshold | None
) -> None:
    options = {"in_bypass": in_bypass, "weights": weights}
    assert drift(loss, advantage, V, **options).abs().max() < 1e-12


@pytest.mark.parametrize("loss", ["ipo", "dro"])
def test_a_penalty_without_an_advantage_is_not_centered(loss: str) -> None:
    """Without advantages nothing is left but the gradient of the penalty: of τ (log r)², and β/2 (log r)²."""
    expected = torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        logits = LOGITS.clone().requires_grad_()
        log_ratio = logits.log_softmax(0)[token] - Q[token]
        share = (0.1 if loss == "ipo" else 0.05) * log_ratio.square()
        expected += Q[token].exp() * torch.autograd.grad(share, logits)[0]
    assert expected.abs().max() > 0.005
    torch.testing.assert_close(drift(loss, 0.0, V, penalty=0.1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("advantage", [-1.3, 0.8])
def test_without_centering_it_is_not(advantage: float) -> None:
    """The gradient of -A Σ q log p is A (p - q)."""
    expected = advantage * (LOGITS.softmax(0) - Q.exp())
    torch.testing.assert_close(drift("reinforce", advantage, None), expected, rtol=1e-12, atol=1e-12)
    assert expected.abs().max() > 0.03


@pytest.mark.parametrize("top_k", [1, 4, 8])
def test_a_tail_that_is_proportional_leaves_what_the_tail_differs_by(top_k: int) -> None:
    """Of the drift A (p - q) there stays A (q̂ - q): q̂ is q in the head, and p, scaled to q's mass, in the
    tail. Without a tail the head's part is taken off alone."""
    p, q, advantage = LOGITS.softmax(0), Q.exp(), 0.8
    is_head = torch.zeros(V, dtype=torch.bool).index_fill(0, Q.topk(top_k).indices, True)
    q_hat = q.where(is_head, p * (q[~is_head].sum() / p[~is_head].sum()))
    torch.testing.assert_close(
        drift("reinforce", advantage, top_k), advantage * (q_hat - q), rtol=1e-10, atol=1e-12
    )
    # Σ_head q ∇log p is q - Q p in the head, and -Q p outside.
    head_alone = q.where(is_head, 0) - q[is_head].sum() * p
    torch.testing.assert_close(
        drift("reinforce", advantage, top_k, tail=False),
        advantage * (p - q + head_alone),
        rtol=1e-10,
        atol=1e-12,
    )


def test_the_two_policies_being_one_centering_changes_nothing() -> None:
    logits = LOGITS.clone().requires_grad_()
    p = logits.log_softmax(0)
    one = torch.ones(1, 1, dtype=torch.bool)
    inputs = PolicyLossInputs(
        p[0].detach().view(1, 1),
        p[0].view(1, 1),
        torch.ones(1, 1, dtype=torch.float64),
        one,
        one,
        one,
        aggregation=Aggregation("token-mean", num_tokens=1),
    )
    head = SamplerHead(p[:3].detach().view(1, 1, -1), p[:3].view(1, 1, -1)).with_tail()
    term, metrics = centering_term(
        resolve_policy_loss("reinforce"), inputs, head, divides_by_rollout=True, weights=None
    )
    (gradient,) = torch.autograd.grad(term, logits)
    assert gradient.abs().max() < 1e-15
    assert float(metrics["rollout_corr/drift_norm"].value) < 1e-15
    head_mass = float(p.detach()[:3].exp().sum())
    assert float(metrics["rollout_corr/centering_head_mass"].value) == pytest.approx(head_mass)


def test_tokens_outside_the_loss_and_missing_heads_add_nothing() -> None:
    """NaN there is harmless, also to the gradient."""
    p = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    candidates = torch.full((2, 3, 4), -2.0, dtype=torch.float64)
    candidates[0, 1] = torch.nan
    candidates.requires_grad_()
    q = torch.full((2, 3, 4), -torch.inf, dtype=torch.float64)
    q[1, 2, 0] = -0.5
    mask = torch.tensor([[True, False, True], [True, True, True]])
    inputs = clean_policy_loss_inputs(
        PolicyLossInputs(
            p.detach(), p, torch.ones(2, 3), mask, mask, mask, aggregation=Aggregation("token-sum")
        )
    )
    term, _ = centering_term(
        resolve_policy_loss("reinforce"),
        inputs,
        SamplerHead(q, candidates),
        divides_by_rollout=True,
        weights=None,
    )
    term.backward()
    assert candidates.grad is not None
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    expected[1, 2, 0] = torch.tensor(-0.5, dtype=torch.float64).exp()
    torch.testing.assert_close(candidates.grad, expected)
