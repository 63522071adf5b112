"""Entropy and divergence terms."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.losses import Aggregation, compute_entropy_loss, compute_kl_loss

KEPT = torch.tensor([[1, 0, 1], [0, 0, 0]])
RESPONSE = torch.tensor([[1, 1, 1], [1, 0, 0]])


def test_entropy_runs_over_kept_tokens_and_divides_by_what_is_given() -> None:
    entropy = torch.tensor([[1.0, torch.nan, 4.0], [9.0, torch.nan, 9.0]])
    kept_mean, metrics = compute_entropy_loss(entropy, KEPT)
    assert kept_mean.item() == 2.5
    assert metrics["actor/entropy"].mean().item() == 2.5
    assert compute_entropy_loss(entropy, KEPT, RESPONSE)[0].item() == 5 / 4
    assert compute_entropy_loss(entropy, KEPT, aggregation=Aggregation("token-mean", num_tokens=10))[0].item() == 0.5


def test_divergence_by_hand_with_its_gradient() -> None:
    log_probs = torch.tensor([[-1.0, torch.nan, -2.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    reference = torch.tensor([[-1.5, -1.0, -1.0], [torch.nan, -1.0, -1.0]])
    loss, metrics = compute_kl_loss(log_probs, reference, "k2", KEPT, RESPONSE)
    loss.backward()
    assert loss.item() == pytest.approx((0.5 * 0.5**2 + 0.5 * 1.0**2) / 4)
    assert metrics["actor/kl_loss"].mean().item() == pytest.approx((0.125 + 0.5) / 2)
    assert log_probs.grad.tolist() == [[0.125, 0.0, -0.25], [0.0, 0.0, 0.0]]


def test_runs_without_reading_tensors_on_the_host() -> None:
    with FakeTensorMode():
        ones = torch.ones(2, 3)
        compute_entropy_loss(ones, ones)
        compute_kl_loss(ones, ones, "low_var_kl", ones)
