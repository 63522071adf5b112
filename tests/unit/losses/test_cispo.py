"""Clipped, detached ratios."""

import math

import pytest
import torch

from verl_rc.losses import compute_policy_loss


@pytest.mark.parametrize(("ratio", "weight"), [(0.1, 0.8), (0.9, 0.9), (3.0, 3.0), (9.0, 6.0)])
def test_every_token_keeps_a_gradient_scaled_by_the_clipped_ratio(ratio: float, weight: float) -> None:
    log_probs = torch.tensor([[-1.5]], dtype=torch.float64, requires_grad=True)
    loss, metrics = compute_policy_loss(
        "cispo",
        log_probs.detach() - math.log(ratio),
        log_probs,
        torch.tensor([[2.0]]),
        torch.ones(1, 1),
        config={"clip_ratio_low": 0.2, "clip_ratio_high": 5.0},
    )
    loss.backward()
    assert loss.item() == pytest.approx(2 * weight * 1.5)
    assert log_probs.grad.item() == pytest.approx(-2 * weight)
    assert metrics["actor/pg_clipfrac"].mean().item() == float(ratio != weight)
