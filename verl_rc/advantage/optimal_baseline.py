"""The baseline that minimises the variance of the policy gradient, position by position."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from verl_rc.advantage.inputs import AdvantageInputs, required, required_groups
from verl_rc.advantage.reinforce import returns_to_go
from verl_rc.advantage.response_order import ResponseOrder

WEIGHT_EPSILON = 1e-8
"""Added to a group's sum of weights, dimensionless."""


def optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns-to-go minus the variance-optimal baseline of each position (OTB, arXiv:2602.07078).

    w_t = 1 − 2 π_t + Σ_v π_v², the expected squared norm of the token's gradient with respect to the logits, times ρ_t²
    when there are importance weights; W_t = Σ_{u ≤ t} w_u; B_t = Σ_j W_t^j G_t^j / (Σ_j W_t^j + 1e-8) over the group's
    rows that have a response token at t; A = G − B. Where fewer than two rows have one, B is 0: a row alone would
    cancel itself.

    Returns:
        Advantages and returns G, in units of reward, [B, T].
    """
    groups = required_groups(inputs, "optimal_token_baseline")
    old_log_probs = required(inputs.old_log_probs, "old_log_probs", "optimal_token_baseline")
    sum_pi_squared = required(inputs.sum_pi_squared, "sum_pi_squared", "optimal_token_baseline")
    mask = inputs.response_mask
    returns = returns_to_go(inputs.token_level_rewards, mask, 1.0)
    gradient_norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    if inputs.rollout_is_weights is not None:
        gradient_norms = gradient_norms * inputs.rollout_is_weights.square()
    weights = gradient_norms.to(returns.dtype).where(mask, 0).cumsum(dim=-1).where(mask, 0)
    baselines = groups.sum(weights * returns) / (groups.sum(weights) + WEIGHT_EPSILON)
    shared = groups.sum(mask.to(returns.dtype)) > 1
    row_baselines = groups.per_row(baselines.where(shared, 0))
    return (returns - row_baselines).where(mask, 0), returns


def tir_optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """`optimal_token_baseline` on response tokens lined up across turns, for answers with tool output in between.

    Rows of one prompt are compared at equal numbers of response tokens rather than at equal positions.

    Returns:
        Advantages and returns, in units of reward, [B, T].
    """
    order = ResponseOrder.from_mask(inputs.response_mask)
    weights = inputs.rollout_is_weights
    packed = replace(
        inputs,
        token_level_rewards=order.pack_rewards(inputs.token_level_rewards),
        response_mask=order.pack(inputs.response_mask.to(inputs.token_level_rewards.dtype)).bool(),
        old_log_probs=order.pack(required(inputs.old_log_probs, "old_log_probs", "tir_optimal_token_baseline")),
        sum_pi_squared=order.pack(required(inputs.sum_pi_squared, "sum_pi_squared", "tir_optimal_token_baseline")),
        rollout_is_weights=None if weights is None else order.pack(weights),
    )
    advantages, returns = optimal_token_baseline(packed)
    return order.unpack(advantages), order.unpack(returns)
