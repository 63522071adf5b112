"""Generalised advantage estimation with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.advantage.inputs import AdvantageInputs, required
from verl_rc.advantage.response_order import ResponseOrder, discounted_suffix_sums, in_row_blocks
from verl_rc.tensor_ops import masked_whiten


def gae(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv:1506.02438) over response tokens, whitened over the batch.

    δ_t = r_t + γ V_{t+1} − V_t and A_t = δ_t + γ λ A_{t+1}, where t + 1 is the row's next *response* token: tokens
    between turns are no decisions of the policy. After the last one V and A are 0. The returns A + V are taken before
    whitening; whitening uses every response token.

    Returns:
        Advantages, dimensionless, and returns, in units of reward, [B, T].
    """
    values = required(inputs.values, "values", "gae")
    returns = generalised_returns(inputs.token_level_rewards, values, inputs.response_mask, inputs.gamma, inputs.lam)
    advantages = returns - values.where(inputs.response_mask, 0)
    return masked_whiten(advantages, inputs.response_mask), returns


def generalised_returns(rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float) -> Tensor:
    """Computes the λ-returns A_t + V_t of the response tokens, 0 elsewhere.

    Args:
        rewards: [B, T], in units of reward.
        values: [B, T], in units of reward.
        response_mask: [B, T], bool.
        gamma: discount per response token, in [0, 1].
        lam: decay of the estimator per response token, in [0, 1].

    Returns:
        [B, T], in units of reward; summed in float64.
    """

    def block_returns(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        order = ResponseOrder.from_mask(mask)
        packed_values = order.pack(values).to(torch.float64)
        residuals = order.pack_rewards(rewards) - packed_values
        residuals[:, :-1] += gamma * packed_values[:, 1:]
        packed_returns = discounted_suffix_sums(residuals, gamma * lam).add_(packed_values)
        return order.unpack(packed_returns.to(rewards.dtype))

    return in_row_blocks(block_returns, rewards, values, response_mask)
