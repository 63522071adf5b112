"""Geometric means of clipped ratios: a loop, rejection, zero weights."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_rc.losses import compute_policy_loss

CONFIG = {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4}


def test_equals_a_loop_in_float64(make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=9)
    loss, _ = compute_policy_loss("geo_mean", **batch.policy_loss_arguments(), config=CONFIG)
    total, rows = 0.0, 0
    for row in range(6):
        tokens = batch.response_mask[row].nonzero().flatten().tolist()
        kept = batch.loss_mask[row].nonzero().flatten().tolist()
        rows += bool(tokens)
        if not kept:
            continue
        exponents = []
        for t in tokens:
            gap = (batch.log_probs - batch.old_log_probs)[row, t].item()
            exponents.append(min(gap, 0.4) if batch.advantages[row, t] > 0 else max(gap, -0.3))
        advantage = sum(batch.advantages[row, t].item() for t in tokens) / len(tokens)
        weight = math.exp(sum(math.log(batch.weights[row, t].item() + 1e-10) for t in kept) / len(kept))
        total -= weight * advantage * math.exp(sum(exponents) / len(exponents))
    assert loss.item() == pytest.approx(total / rows)


def one_row(kept: list[int], weights: list[float]) -> tuple[float, list[float]]:
    gaps = torch.tensor([[0.1, -0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    loss, _ = compute_policy_loss(
        "geo_mean",
        torch.zeros_like(gaps),
        gaps,
        torch.ones(1, 3),
        torch.tensor([kept]),
        torch.ones(1, 3),
        rollout_is_weights=torch.tensor([weights], dtype=torch.float64),
        config=CONFIG,
    )
    loss.backward()
    return loss.item(), gaps.grad[0].tolist()


def test_rejecting_a_token_takes_its_gradient_and_leaves_the_ratio() -> None:
    ratio = math.exp(0.2 / 3)
    loss, gradient = one_row([1, 0, 1], [1.0, 1.0, 1.0])
    assert loss == pytest.approx(-ratio)
    assert gradient == pytest.approx([-ratio / 3, 0, -ratio / 3])


def test_a_weight_of_zero_is_a_rejection_and_does_not_shrink_the_row() -> None:
    ratio = math.exp(0.2 / 3)
    loss, gradient = one_row([1, 1, 1], [2.0, 0.0, 2.0])
    assert loss == pytest.approx(-2 * ratio)
    assert gradient == pytest.approx([-2 * ratio / 3, 0, -2 * ratio / 3])
    assert one_row([1, 1, 1], [0.0, 0.0, 0.0]) == (0.0, [0.0, 0.0, 0.0])


def test_shares_outside_the_band_are_split_by_the_sign_of_the_advantage() -> None:
    gaps = torch.tensor([[0.5, 0.0, -0.5], [-0.5, 0.1, 0.0]])
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    _, metrics = compute_policy_loss("geo_mean", torch.zeros(2, 3), gaps, advantages, torch.ones(2, 3), config=CONFIG)
    assert metrics["actor/pg_clipfrac"].mean().item() == pytest.approx(2 / 6)
    assert metrics["actor/pg_clipfrac_lower"].mean().item() == pytest.approx(1 / 6)
