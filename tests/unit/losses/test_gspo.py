"""Sequence ratios: by hand, and untouched by rejection."""

import math

import pytest
import torch

from verl_rc.losses import compute_policy_loss


def test_one_row_by_hand() -> None:
    gaps = torch.tensor([[0.3, -0.1, 0.4, 7.0]], dtype=torch.float64)
    log_probs = (gaps - 1).requires_grad_()
    response = torch.tensor([[1, 1, 1, 0]])
    loss, metrics = compute_policy_loss(
        "gspo",
        torch.full_like(gaps, -1),
        log_probs,
        torch.full_like(gaps, -2.0),
        response,
        config={"clip_ratio": 0.5},
    )
    ratio = math.exp((0.3 - 0.1 + 0.4) / 3)
    loss.backward()
    assert loss.item() == pytest.approx(2 * ratio)
    assert log_probs.grad[0].tolist() == pytest.approx([2 * ratio / 3] * 3 + [0])
    assert metrics["actor/ppo_kl"].mean().item() == pytest.approx(-0.2)


def test_rejecting_a_token_removes_its_term_and_keeps_the_sequence_ratio() -> None:
    gaps = torch.tensor([[0.3, -0.1, 0.4]], dtype=torch.float64)
    arguments = (torch.zeros_like(gaps), gaps, torch.full_like(gaps, -1.0))
    response, kept = torch.ones(1, 3), torch.tensor([[1, 0, 1]])
    loss, _ = compute_policy_loss("gspo", *arguments, kept, response, config={"clip_ratio": 0.5})
    assert loss.item() == pytest.approx(2 * math.exp(0.2) / 3)


def test_the_log_ratio_is_bounded_at_ten() -> None:
    gap = torch.tensor([[50.0]])
    loss, _ = compute_policy_loss("gspo", -gap, torch.zeros(1, 1), -torch.ones(1, 1), torch.ones(1, 1))
    assert loss.item() == pytest.approx(math.exp(10), rel=1e-5)
