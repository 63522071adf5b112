"""The quadratic penalty."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from verl_rc.losses import compute_policy_loss


@pytest.mark.parametrize("beta", [0.1, 2.5])
def test_equals_a_loop_in_float64(beta: float, make_batch: Callable[..., Any]) -> None:
    batch = make_batch(seed=8)
    log_probs = batch.log_probs.clone().requires_grad_()
    loss, metrics = compute_policy_loss(
        "dro", **{**batch.policy_loss_arguments(), "log_probs": log_probs}, config={"dro_beta": beta}
    )
    loss.backward()
    total, count, gap_total, kept = 0.0, 0, 0.0, 0
    slopes = torch.zeros_like(batch.log_probs)
    for row, column in batch.response_mask.nonzero().tolist():
        count += 1
        if not batch.loss_mask[row, column]:
            continue
        kept += 1
        lp, advantage, weight = (x[row, column].item() for x in (batch.log_probs, batch.advantages, batch.weights))
        gap = lp - batch.old_log_probs[row, column].item()
        gap_total -= gap
        total -= weight * (lp * advantage - beta / 2 * gap**2)
        slopes[row, column] = -weight * (advantage - beta * gap)
    assert loss.item() == pytest.approx(total / count)
    torch.testing.assert_close(log_probs.grad, slopes / count)
    assert metrics["actor/ppo_kl"].mean().item() == pytest.approx(gap_total / kept)


def test_needs_a_beta() -> None:
    with pytest.raises(ValueError, match=r"policy_loss\.dro_beta > 0, got None"):
        compute_policy_loss("dro", *[torch.zeros(1, 1)] * 4)
