"""Selection by covariance: loops in float64, thresholds, the draw."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from verl_rc.algorithm.losses import PolicyLossInputs, compute_policy_loss
from verl_rc.algorithm.losses.selection import selection_scores, selection_threshold

NOT_SELECTABLE = torch.iinfo(torch.int64).min


def covariances(batch: Any) -> dict[tuple[int, int], float]:
    """(A − mean A)(lp − mean lp) of every kept token, in float64."""
    tokens = [(row, column) for row, column in batch.loss_mask.nonzero().tolist()]
    advantage_mean = sum(batch.advantages[t].item() for t in tokens) / len(tokens)
    log_prob_mean = sum(batch.log_probs[t].item() for t in tokens) / len(tokens)
    return {
        t: (batch.advantages[t].item() - advantage_mean) * (batch.log_probs[t].item() - log_prob_mean)
        for t in tokens
    }


@pytest.mark.parametrize(("share", "count"), [(1e-6, 1), (0.3, None), (1.0, None)])
def test_kl_cov_penalises_the_tokens_of_largest_covariance(
    share: float, count: int | None, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(seed=10)
    loss, metrics = compute_policy_loss(
        "kl_cov", **batch.policy_loss_arguments(), config={"kl_cov_ratio": share, "ppo_kl_coef": 0.7}
    )
    ordered = sorted(covariances(batch).items(), key=lambda item: -item[1])
    selected = {token for token, _ in ordered[: count or max(1, math.floor(share * len(ordered)))]}
    total, gap_total = 0.0, 0.0
    for token, _ in ordered:
        gap = (batch.log_probs[token] - batch.old_log_probs[token]).item()
        gap_total += abs(gap)
        penalty = 0.7 * abs(gap) if token in selected else 0.0
        total += batch.weights[token].item() * (-batch.advantages[token].item() * math.exp(gap) + penalty)
    assert loss.item() == pytest.approx(total / batch.response_mask.sum().item())
    assert metrics["actor/ppo_kl"].value.item() == pytest.approx(gap_total / len(ordered))


def clip_cov(batch: Any, share: float, low: float, high: float) -> tuple[float, float, torch.Tensor]:
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss(
        "clip_cov",
        **{**batch.policy_loss_arguments(), "log_probs": log_probs},
        config={"clip_ratio": 0.2, "clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high},
    )
    loss.backward()
    return loss.item(), metrics["actor/pg_clipfrac"].value.item(), log_probs.grad


@pytest.mark.parametrize("share", [1e-6, 0.2, 1.0])
def test_clip_cov_drops_the_right_number_of_unclipped_tokens_in_the_band(
    share: float, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(seed=11, rows=20)
    low, high = -0.3, 1.0
    band = {token for token, covariance in covariances(batch).items() if low < covariance < high}
    candidates, undropped_loss = set(), 0.0
    for row, column in batch.loss_mask.nonzero().tolist():
        token = (row, column)
        ratio = math.exp((batch.log_probs[token] - batch.old_log_probs[token]).item())
        advantage = batch.advantages[token].item()
        term = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        undropped_loss += batch.weights[token].item() * term
        if token in band and term == -advantage * ratio:
            candidates.add(token)
    kept_tokens = int(batch.loss_mask.sum())
    count = min(max(1, math.floor(share * kept_tokens)), len(candidates))
    loss, dropped_share, gradient = clip_cov(batch, share, low, high)
    assert dropped_share == pytest.approx(count / kept_tokens)
    dropped = {token for token in candidates if gradient[token] == 0}
    assert len(dropped) == count
    for token in dropped:
        gap = (batch.log_probs[token] - batch.old_log_probs[token]).item()
        undropped_loss += batch.weights[token].item() * batch.advantages[token].item() * math.exp(gap)
    assert loss == pytest.approx(undropped_loss / batch.response_mask.sum().item())


def test_clip_cov_drops_nothing_when_the_band_is_empty(make_batch: Callable[..., Any]) -> None:
    _, share, gradient = clip_cov(make_batch(seed=12), 1.0, 1e6, 2e6)
    assert share == 0
    assert gradient.any()


def test_the_draw_is_uniform_and_not_ordered_by_covariance() -> None:
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(64, 256, generator=generator)
    inputs = of_tokens(torch.randn(64, 1, generator=generator).expand(64, 256), old)
    zero = torch.zeros(())
    scores = selection_scores("clip_cov", inputs, zero, zero)
    candidates = scores > NOT_SELECTABLE
    drawn, covariance = scores[candidates] / 2**31, (inputs.advantages * inputs.log_probs)[candidates]
    counts = torch.histc(drawn, bins=10, min=0, max=1)
    assert drawn.numel() > 500
    chi_square = ((counts - drawn.numel() / 10) ** 2 / (drawn.numel() / 10)).sum()
    assert chi_square < 27.9  # the 99.9th percentile for 9 degrees of freedom
    assert torch.corrcoef(torch.stack([drawn, covariance]))[0, 1].abs() < 4 / math.sqrt(drawn.numel())


def test_threshold_is_the_score_of_the_last_selected_token() -> None:
    scores = torch.tensor([[3, NOT_SELECTABLE], [7, 5]])
    for size, expected in ((1, 7), (2, 5), (3, 3), (4, NOT_SELECTABLE), (9, NOT_SELECTABLE)):
        assert selection_threshold(scores, torch.tensor(size)).item() == expected


def test_scores_order_by_covariance_also_below_zero() -> None:
    covariance = torch.tensor([[-3e38, -2.0, -1e-40, -0.0, 0.0, 1e-40, 0.5, 3e38]])
    inputs = of_tokens(covariance, torch.ones_like(covariance))
    scores = selection_scores("kl_cov", inputs, torch.zeros(()), torch.zeros(()))[0] >> 31
    assert scores.tolist() == sorted(scores.tolist())
    assert scores.unique().numel() == 7  # both zeros are one number


def of_tokens(advantages: Tensor, old_log_probs: Tensor, loss_mask: Tensor | None = None) -> PolicyLossInputs:
    mask = torch.ones_like(old_log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
    return PolicyLossInputs(old_log_probs, old_log_probs, advantages, mask, mask, mask)


def penalties(advantage: float, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """How much of each token is penalised: what a penalty of 1 nat a nat, on gaps of −0.1, takes from the
    gradient."""
    log_probs = (old_log_probs - 0.1).requires_grad_()
    arguments = {"old_log_probs": old_log_probs, "log_probs": log_probs, "loss_mask": mask}
    advantages = torch.full_like(old_log_probs, advantage)

    def gradient(coefficient: float) -> Tensor:
        config = {"kl_cov_ratio": 0.01, "ppo_kl_coef": coefficient}
        loss, _ = compute_policy_loss(
            "kl_cov", **arguments, advantages=advantages, config=config, aggregation="token-sum"
        )
        return torch.autograd.grad(loss, log_probs)[0]

    return gradient(0.0) - gradient(1.0)


@pytest.mark.parametrize("advantage", [0.0, 1.0, 0.1, -1 / 3], ids=str)
def test_kl_cov_penalises_its_share_when_all_covariances_are_equal(advantage: float) -> None:
    """A batch of groups that are all right or all wrong: every advantage is the same."""
    old = -3 * torch.rand(80, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(12).expand(80, 12) < 10
    penalised = penalties(advantage, old, mask)
    assert ((penalised == 0) | ((penalised - 1).abs() < 1e-9)).all()
    assert (penalised > 0).sum() == 8  # 1 % of 800
    assert (penalised > 0).any(dim=1).sum() > 4  # spread, not the first or the last tokens
    order = torch.randperm(80, generator=torch.Generator().manual_seed(2))
    assert torch.equal(penalties(advantage, old[order], mask[order]), penalised[order])
    widened = penalties(
        advantage, torch.nn.functional.pad(old, (0, 5)), torch.nn.functional.pad(mask, (0, 5))
    )
    assert torch.equal(widened[:, :12], penalised)


def test_tokens_that_nothing_tells_apart_share_the_places_left() -> None:
    """300 rows of one token, all the same: 3 places, a hundredth of the penalty each."""
    penalised = penalties(0.0, torch.full((300, 1), -0.5), torch.ones(300, 1, dtype=torch.bool))
    torch.testing.assert_close(penalised, torch.full((300, 1), 0.01))


def test_clip_cov_drops_its_share_of_tokens_that_nothing_tells_apart() -> None:
    old = torch.full((300, 1), -0.5)
    advantages = torch.cat([torch.full((150, 1), 1.0), torch.full((150, 1), -1.0)])
    log_probs = old + 0.1 * advantages  # covariance 0.1 in every token
    mask = torch.ones(300, 1, dtype=torch.bool)
    config = {"clip_cov_ratio": 0.1, "clip_cov_lb": 0.05, "clip_cov_ub": 1.0}
    _, metrics = compute_policy_loss("clip_cov", old, log_probs, advantages, mask, config=config)
    assert metrics["actor/pg_clipfrac"].value == pytest.approx(0.1)


def second_moments(batch: Any) -> dict[tuple[int, int], float]:
    """(log r)² of every kept token that would go on in its direction, rounded to float32 as the loss orders
    them."""
    gaps = (batch.log_probs - batch.old_log_probs).float()
    return {
        (row, column): float(gaps[row, column].square().double())
        for row, column in batch.loss_mask.nonzero().tolist()
        if float(gaps[row, column] * batch.advantages[row, column]) > 0
    }


@pytest.mark.parametrize("threshold", [1e-6, 0.01, 0.04, 0.1, 10.0])
def test_m2po_drops_the_fewest_tokens_from_the_largest_until_the_mean_is_small(
    threshold: float, make_batch: Callable[..., Any]
) -> None:
    batch = make_batch(seed=12, rows=20)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss(
        "m2po",
        **{**batch.policy_loss_arguments(), "log_probs": log_probs},
        config={"m2_threshold": threshold},
    )
    loss.backward()
    moments, tokens = second_moments(batch), [*map(tuple, batch.loss_mask.nonzero().tolist())]
    kept = sorted(moments, key=lambda token: moments[token])
    while kept and sum(moments[token] for token in kept) > threshold * len(kept):
        kept.pop()
    total, slopes = 0.0, torch.zeros_like(batch.log_probs)
    count = batch.response_mask.sum().item()
    dropped = moments.keys() - set(kept)
    for token in tokens:
        if token in dropped:
            continue
        gap = (batch.log_probs[token] - batch.old_log_probs[token]).item()
        slopes[token] = -batch.weights[token] * batch.advantages[token] * math.exp(gap) / count
        total += slopes[token].item()
    assert len(kept) == {1e-6: 0, 10.0: len(moments)}.get(threshold, len(kept))
    assert threshold not in (0.01, 0.04, 0.1) or 0 < len(kept) < len(moments)
    assert loss.item() == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(log_probs.grad, slopes)
    share = len(dropped) / len(tokens)
    assert metrics["actor/pg_clipfrac"].value.item() == pytest.approx(share, abs=1e-7)


def test_m2po_keeps_or_drops_equal_tokens_together() -> None:
    gaps = torch.tensor([[0.1, -0.3, 0.3, 0.3, 2.0]], dtype=torch.float64)
    log_probs = (gaps - 3).requires_grad_()
    loss, _ = compute_policy_loss(
        "m2po",
        torch.full_like(gaps, -3.0),
        log_probs,
        torch.ones_like(gaps),
        torch.ones_like(gaps),
        config={"m2_threshold": 0.06},
    )  # (0.01 + 0.09) / 2 is 0.05: one of two tokens at 0.3 would be kept, were they told apart
    loss.backward()
    # The token at -0.3 comes back to where it was: it is not dropped.
    assert [bool(slope) for slope in log_probs.grad[0]] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("target", "moved"), [(0.0, "neither"), (0.5, "high"), (100.0, "both to their ends")]
)
def test_bapo_moves_its_clip_range_until_positive_advantages_weigh_enough(
    target: float, moved: str, make_batch: Callable[..., Any]
) -> None:
    """As the search of the authors' code, which moves the lower end first, over sums in loops."""
    batch = make_batch(seed=12, rows=20)
    batch.advantages[batch.advantages > 0] *= 0.5
    ratios = (3 * (batch.log_probs - batch.old_log_probs)).exp()
    log_probs = (batch.old_log_probs + ratios.log()).requires_grad_()
    tokens = [tuple(place) for place in batch.loss_mask.nonzero().tolist()]

    def weighs_enough(low: float, high: float) -> bool:
        positive = negative = 0.0
        for token in tokens:
            advantage, ratio = batch.advantages[token].item(), ratios[token].item()
            positive += max(advantage, 0.0) * min(ratio, high)
            negative += max(-advantage, 0.0) * max(ratio, low)
        return positive >= target * negative

    low, high = 0.6, 1.2
    while low < 0.9 and not weighs_enough(low, high):
        low = min(low + 0.05, 0.9)
    while high < 3.0 and not weighs_enough(low, high):
        high = min(high + 0.05, 3.0)
    ends = {"neither": (0.6, 1.2), "both to their ends": (0.9, 3.0)}
    assert moved not in ends or (low, high) == pytest.approx(ends[moved])
    assert moved != "high" or (low == 0.9 and 1.2 < high < 3.0)
    loss, metrics = compute_policy_loss(
        "bapo",
        **{**batch.policy_loss_arguments(), "log_probs": log_probs},
        config={"adv_ratio_target": target},
    )
    loss.backward()
    assert metrics["actor/ratio_low"].value.item() == pytest.approx(low)
    assert metrics["actor/ratio_high"].value.item() == pytest.approx(high)
    total, slopes = 0.0, torch.zeros_like(ratios)
    count = batch.response_mask.sum().item()
    for token in tokens:
        advantage, ratio = batch.advantages[token].item(), ratios[token].item()
        share = batch.weights[token].item() / count
        term = max(-advantage * ratio, -advantage * min(max(ratio, low), high))
        moves = term == -advantage * ratio and not (advantage < 0 and ratio > 3.0)
        total += share * (min(term, -advantage * 3.0) if advantage < 0 else term)
        slopes[token] = -share * advantage * ratio if moves else 0.0
    assert loss.item() == pytest.approx(total, abs=1e-12)
    torch.testing.assert_close(log_probs.grad, slopes)
