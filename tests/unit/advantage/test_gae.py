"""Generalised advantage estimation against loops and identities."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_rc.advantage import compute_advantages
from verl_rc.advantage.gae import generalised_returns


def loop_returns(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """A + V token by token from the right, in Python floats."""
    returns = torch.zeros_like(rewards)
    for row in range(rewards.shape[0]):
        following_value, following_advantage = 0.0, 0.0
        for t in reversed(mask[row].nonzero().flatten().tolist()):
            value = values[row, t].item()
            residual = rewards[row, t].item() + gamma * following_value - value
            following_advantage = residual + gamma * lam * following_advantage
            following_value = value
            returns[row, t] = following_advantage + value
    return returns


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 999),
    length=st.sampled_from([1, 5, 63, 64, 65, 200]),
    gamma=st.sampled_from([0.0, 0.9, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_equals_a_loop_over_response_tokens(seed: int, length: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 3, length, generator=generator, dtype=torch.float64)
    mask = torch.rand(3, length, generator=generator) < 0.6
    actual = generalised_returns(rewards * mask, values, mask, gamma, lam)
    torch.testing.assert_close(actual, loop_returns(rewards, values, mask, gamma, lam))


def test_long_rows_in_float32_stay_close_to_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 2, 5000, generator=generator)
    mask = torch.ones(2, 5000, dtype=torch.bool)
    actual = generalised_returns(rewards, values, mask, 1.0, 1.0)
    exact = rewards.double().flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(actual.double(), exact, rtol=1e-6, atol=1e-6)


def test_with_lambda_one_the_advantage_is_the_whitened_return_minus_value() -> None:
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.7
    advantages, returns = compute_advantages("gae", rewards * mask, mask, values=values)
    to_go = (rewards * mask).flip(-1).cumsum(-1).flip(-1) * mask
    torch.testing.assert_close(returns, to_go)
    gaps = (to_go - values)[mask]
    torch.testing.assert_close(advantages[mask], (gaps - gaps.mean()) / gaps.std(), rtol=1e-6, atol=1e-6)


def test_three_tokens_with_tool_output_between_by_hand() -> None:
    advantages, returns = compute_advantages(
        "gae",
        torch.tensor([[1.0, 0.0, 0.0, 2.0, 0.0]]),
        torch.tensor([[1, 0, 0, 1, 0]]),
        values=torch.tensor([[0.5, 9.0, 9.0, 1.0, 9.0]]),
        gamma=0.5,
        lam=0.5,
    )
    assert returns[0].tolist() == pytest.approx([1 + 0.5 * 1.0 + 0.25 * 1.0, 0, 0, 2.0, 0])
    # The advantages 1.25 and 1.0 have mean 1.125 and, with n − 1, variance 0.03125.
    assert advantages[0].tolist() == pytest.approx([0.125 / 0.03125**0.5, 0, 0, -0.125 / 0.03125**0.5, 0])
