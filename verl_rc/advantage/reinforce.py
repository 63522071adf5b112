"""Advantages from returns-to-go without a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.advantage.inputs import AdvantageInputs, required
from verl_rc.advantage.response_order import ResponseOrder, discounted_suffix_sums, in_row_blocks
from verl_rc.tensor_ops import masked_whiten


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Whitened discounted returns-to-go (REINFORCE++, arXiv:2501.03262).

    G_t = r_t + γ G_{t+1}, where t + 1 is the row's next response token; A = G whitened over the batch's response
    tokens.

    Returns:
        Advantages, dimensionless, and returns G, in units of reward, [B, T].
    """
    returns = returns_to_go(inputs.token_level_rewards, inputs.response_mask, inputs.gamma)
    return masked_whiten(returns, inputs.response_mask), returns


def remax(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns-to-go minus the score of the prompt's greedy answer (ReMax, arXiv:2310.10505); undiscounted.

    Returns:
        Advantages and returns, in units of reward, [B, T].

    Raises:
        ValueError: when `reward_baselines` is missing or does not have one entry per row.
    """
    baselines = required(inputs.reward_baselines, "reward_baselines", "remax")
    if baselines.shape != inputs.response_mask.shape[:1]:
        raise ValueError(
            f"reward_baselines must hold one score per row, [{inputs.response_mask.shape[0]}]; got {tuple(baselines.shape)}"
        )
    returns = returns_to_go(inputs.token_level_rewards, inputs.response_mask, 1.0)
    advantages = returns - baselines.to(returns.dtype).unsqueeze(-1)
    return advantages.where(inputs.response_mask, 0), returns


def returns_to_go(rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Computes G_t = r_t + γ G_{t+1} over the response tokens of each row, 0 elsewhere.

    Args:
        rewards: [B, T], in units of reward.
        response_mask: [B, T], bool.
        gamma: discount per response token, in [0, 1].

    Returns:
        [B, T], in units of reward; summed in float64.
    """

    def block_returns(rewards: Tensor, mask: Tensor) -> Tensor:
        order = ResponseOrder.from_mask(mask)
        packed = discounted_suffix_sums(order.pack_rewards(rewards).to(torch.float64), gamma)
        return order.unpack(packed.to(rewards.dtype))

    return in_row_blocks(block_returns, rewards, response_mask)
