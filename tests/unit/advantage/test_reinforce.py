"""Returns-to-go without a critic."""

import pytest
import torch

from verl_rc.advantage import compute_advantages
from verl_rc.advantage.reinforce import returns_to_go

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 4.0], [0.0, 3.0, 0.0, 0.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]]).bool()


def test_returns_by_hand_skip_what_the_policy_did_not_write() -> None:
    assert returns_to_go(REWARDS, MASK, 0.5).tolist() == [[2.0, 0.0, 2.0, 4.0], [1.5, 3.0, 0.0, 0.0]]


def test_reinforce_plus_plus_whitens_returns_over_response_tokens() -> None:
    advantages, returns = compute_advantages("reinforce_plus_plus", REWARDS, MASK, gamma=0.5)
    numbers = torch.tensor([2.0, 2.0, 4.0, 1.5, 3.0], dtype=torch.float64)
    torch.testing.assert_close(returns[MASK], numbers)
    torch.testing.assert_close(advantages[MASK], (numbers - 2.5) / numbers.std())


def test_remax_subtracts_each_rows_baseline_from_undiscounted_returns() -> None:
    advantages, returns = compute_advantages("remax", REWARDS, MASK, reward_baselines=torch.tensor([1.0, 5.0]), gamma=0.5)
    assert returns.tolist() == [[5.0, 0.0, 4.0, 4.0], [3.0, 3.0, 0.0, 0.0]]
    assert advantages.tolist() == [[4.0, 0.0, 3.0, 3.0], [-2.0, -2.0, 0.0, 0.0]]


def test_a_reward_before_the_first_response_token_is_credited_to_it() -> None:
    rewards = torch.tensor([[7.0, torch.nan, 0.0, 1.0]])
    mask = torch.tensor([[False, False, True, True]])
    assert returns_to_go(rewards, mask, 1.0)[0].tolist() == pytest.approx([0, 0, 8, 1])
