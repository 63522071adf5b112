"""The soft gate."""

import math

import pytest
import torch

from verl_rc.losses import compute_policy_loss


@pytest.mark.parametrize(("advantage", "tau"), [(1.5, 2.0), (-1.5, 3.0), (0.0, 3.0)])
def test_value_by_hand_and_slope_of_the_surrogate_at_ratio_one(advantage: float, tau: float) -> None:
    config = {"tau_pos": 2.0, "tau_neg": 3.0}
    for ratio in (0.5, 1.0, 2.0):
        log_probs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        zeros = torch.zeros(1, 1, dtype=torch.float64)
        loss, _ = compute_policy_loss("sapo", zeros, log_probs, zeros + advantage, torch.ones(1, 1), config=config)
        loss.backward()
        assert loss.item() == pytest.approx(-advantage * 4 / tau / (1 + math.exp(-tau * (ratio - 1))))
        if ratio == 1:
            assert log_probs.grad.item() == pytest.approx(-advantage)


def test_rows_are_averaged_before_the_batch_whatever_the_mode() -> None:
    advantages = torch.tensor([[1.0, 1.0, 1.0], [-2.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for mode in ("token-mean", "token-sum"):
        loss, _ = compute_policy_loss(
            "sapo", torch.zeros(2, 3), torch.zeros(2, 3), advantages, mask, config={"tau_neg": 1.0}, aggregation=mode
        )
        assert loss.item() == pytest.approx((-2.0 + 4.0) / 2)
