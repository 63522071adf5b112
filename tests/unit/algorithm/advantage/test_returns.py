"""Response tokens side by side, λ-returns and returns-to-go."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl_rc.algorithm.advantage import compute_advantages
from verl_rc.algorithm.advantage.returns import (
    ResponseOrder,
    discounted_suffix_sums,
    generalised_returns,
    returns_to_go,
)

MASK = torch.tensor([[0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()
NUMBERS = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])


def test_pack_moves_response_tokens_left_and_unpack_moves_them_back() -> None:
    order = ResponseOrder.from_mask(MASK)
    packed = order.pack(NUMBERS)
    assert packed.tolist() == [[2.0, 8.0, 16.0, 0.0, 0.0, 0.0], [0.0] * 6]
    assert order.unpack(packed).tolist() == [[0.0, 2.0, 0.0, 8.0, 16.0, 0.0], [0.0] * 6]


def test_rewards_outside_the_response_go_to_the_token_before_or_the_first() -> None:
    packed = ResponseOrder.from_mask(MASK).pack_rewards(NUMBERS)
    assert packed[0].tolist() == [1.0 + 2.0 + 4.0, 8.0, 16.0 + 32.0, 0.0, 0.0, 0.0]
    spoiled = NUMBERS.masked_fill(~MASK, torch.inf)
    assert ResponseOrder.from_mask(MASK).pack_rewards(spoiled)[0].tolist() == [2.0, 8.0, 16.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("discount", [0.0, 0.3, 0.99, 1.0])
@pytest.mark.parametrize("length", [1, 2, 64, 65, 127, 128, 4097])
def test_suffix_sums_equal_a_loop(length: int, discount: float) -> None:
    terms = torch.randn(2, length, generator=torch.Generator().manual_seed(length), dtype=torch.float64)
    expected, following = torch.zeros_like(terms), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        following = terms[:, t] + discount * following
        expected[:, t] = following
    torch.testing.assert_close(discounted_suffix_sums(terms, discount), expected)


def test_no_positions_and_no_rows() -> None:
    assert discounted_suffix_sums(torch.zeros(2, 0), 0.5).shape == (2, 0)
    assert discounted_suffix_sums(torch.zeros(0, 3), 0.5).shape == (0, 3)


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


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 4.0], [0.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
RETURNS_MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()


def test_returns_by_hand_skip_what_the_policy_did_not_write() -> None:
    assert returns_to_go(REWARDS, RETURNS_MASK, 0.5).tolist() == [[2.0, 0.0, 2.0, 4.0], [1.5, 3.0, 0.0, 0.0]]


def test_reinforce_plus_plus_whitens_returns_over_response_tokens() -> None:
    advantages, returns = compute_advantages("reinforce_plus_plus", REWARDS, RETURNS_MASK, gamma=0.5)
    numbers = torch.tensor([2.0, 2.0, 4.0, 1.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(returns[RETURNS_MASK], numbers)
    torch.testing.assert_close(advantages[RETURNS_MASK], (numbers - 2.5) / numbers.std())


def test_remax_subtracts_each_rows_baseline_from_undiscounted_returns() -> None:
    advantages, returns = compute_advantages(
        "remax", REWARDS, RETURNS_MASK, reward_baselines=torch.tensor([1.0, 5.0]), gamma=0.5
    )
    assert returns.tolist() == [[5.0, 0.0, 4.0, 4.0], [3.0, 3.0, 0.0, 0.0]]
    assert advantages.tolist() == [[4.0, 0.0, 3.0, 3.0], [-2.0, -2.0, 0.0, 0.0]]


def test_a_reward_before_the_first_response_token_is_credited_to_it() -> None:
    rewards = torch.tensor([[7.0, torch.nan, 0.0, 1.0]])
    mask = torch.tensor([[False, False, True, True]])
    assert returns_to_go(rewards, mask, 1.0)[0].tolist() == pytest.approx([0, 0, 8, 1])


def test_a_critic_that_is_right_to_a_float32_step_leaves_no_advantage() -> None:
    rewards = torch.zeros(4, 6)
    rewards[:, -1] = 1000.3
    values = torch.full((4, 6), 1000.3)
    values[::2] = values[::2].nextafter(torch.tensor(torch.inf))
    advantages, _ = compute_advantages("gae", rewards, torch.ones(4, 6), values=values)
    assert advantages.eq(0).all()
