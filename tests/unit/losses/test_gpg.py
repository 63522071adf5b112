"""The plain policy gradient."""

import pytest
import torch

from verl_rc.losses import compute_policy_loss


def test_two_tokens_by_hand_without_looking_at_the_old_policy() -> None:
    log_probs = torch.tensor([[-1.0, -2.0, -4.0]], requires_grad=True)
    loss, metrics = compute_policy_loss(
        "gpg",
        torch.full((1, 3), torch.inf),
        log_probs,
        torch.tensor([[1.0, 3.0, 9.0]]),
        torch.tensor([[1, 1, 0]]),
        rollout_is_weights=torch.tensor([[2.0, 0.5, 9.0]]),
    )
    loss.backward()
    assert loss.item() == pytest.approx((2 * 1 + 0.5 * 6) / 2)
    assert log_probs.grad[0].tolist() == [-1.0, -0.75, 0.0]
    assert metrics == {}
