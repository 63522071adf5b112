"""Group-relative advantage estimators: a baseline per group of responses to one prompt, or per position of a
group."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_rc.algorithm.advantage.inputs import (
    AdvantageInputs,
    Groups,
    register_advantage_estimator,
    required,
    required_groups,
)
from verl_rc.algorithm.advantage.returns import ResponseOrder, returns_to_go, zero_nonfinite_outside
from verl_rc.tensor_ops import is_rounding
from verl_rc.tensor_ops.masked import turn_numbers

STD_EPSILON = 1e-6
"""Added to a group's standard deviation, in units of reward."""


def row_scores(inputs: AdvantageInputs) -> Tensor:
    """Sum each row's rewards over all positions: [B], float64, in units of reward.

    Rewards outside the response (a score written on a tool's output) count; NaN and infinities there do not.
    """

    rewards = zero_nonfinite_outside(inputs.token_level_rewards, inputs.response_mask)
    return rewards.sum(dim=-1, dtype=torch.float64)


def group_scores(inputs: AdvantageInputs, groups: Groups) -> Tensor:
    """``row_scores``, equal within a group in which they differ by rounding alone."""
    magnitudes = replace(inputs, token_level_rewards=inputs.token_level_rewards.abs())
    return groups.without_rounding(row_scores(inputs), row_scores(magnitudes))


@register_advantage_estimator("grpo")
def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (GRPO, arXiv:2402.03300); without the division, Dr. GRPO (arXiv:2503.20783).

    A = (s − mean_g) / (std_g + 1e-6) on every response token, with n − 1 in the standard deviation; without
    ``norm_adv_by_std_in_grpo``, A = s − mean_g. The only row of a group has A = s, because it has no
    baseline.

    Returns:
        Advantages and returns, equal, [B, T].
    """
    return _compared(_normalised if inputs.norm_adv_by_std_in_grpo else _centred, inputs, "grpo")


@register_advantage_estimator("grpo_passk")
def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Reward only a group's best answer, by its lead over the second best (Pass@k training,
    arXiv:2503.19595).

    A = (s_max − s_second) / (std_g + 1e-6) on the best row's tokens, undivided without
    ``norm_adv_by_std_in_grpo``; 0 on all others. Equal best scores have no lead, and the only row of a group
    has no second: both give 0.

    Returns:
        Advantages and returns, equal, [B, T].
    """
    groups = required_groups(inputs, "grpo_passk")
    scores = group_scores(inputs, groups)
    best = groups.is_counted & (scores == groups.per_row(groups.amax(scores)))
    unique = groups.per_row(groups.sum(best.to(scores.dtype))) == 1
    second = groups.per_row(replace(groups, is_counted=groups.is_counted & ~best).amax(scores))
    advantages = (scores - second).where(best & unique & second.isfinite(), 0)
    if inputs.norm_adv_by_std_in_grpo:
        advantages = advantages / (groups.stds(scores) + STD_EPSILON)
    return _broadcast_over_tokens(advantages, inputs)


@register_advantage_estimator("rloo")
def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Leave-one-out baselines (RLOO, arXiv:2402.14740).

    A = s − mean of the group's other scores = n / (n − 1) · (s − mean_g). The only row of a group has A = s.

    Returns:
        Advantages and returns, equal, [B, T].
    """
    return _compared(_leave_one_out, inputs, "rloo")


@register_advantage_estimator("rloo_vectorized")
def rloo_vectorized(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Compute what ``rloo`` does, but the only row of a group has A = 0: verl has both rules, under these
    names.

    Returns:
        Advantages and returns, equal, [B, T].
    """

    def left_out(groups: Groups, scores: Tensor) -> Tensor:
        return _leave_one_out(groups, scores).where(groups.sizes(scores.dtype) > 1, 0)

    return _compared(left_out, inputs, "rloo_vectorized")


@register_advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-centred scores whitened over the batch (REINFORCE++ with baseline, arXiv:2501.03262).

    A = s − mean_g on every response token, then whitened over the batch's response tokens; the mean of a
    group of one is taken as 0.

    Returns:
        Advantages and returns, equal, dimensionless, [B, T].
    """
    return _compared(_centred, inputs, "reinforce_plus_plus_baseline")


@register_advantage_estimator("opo")
def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Scores minus the group's length-weighted mean score (OPO, arXiv:2505.23585).

    A = s − Σ_j n_j s_j / Σ_j n_j with n the number of response tokens. In a group of one A = 0.

    Returns:
        Advantages and returns, equal, in units of reward, [B, T].
    """
    groups = required_groups(inputs, "opo")
    scores = group_scores(inputs, groups)
    lengths = inputs.response_mask.sum(dim=-1).to(scores.dtype)
    baselines = groups.per_row(groups.sum(lengths * scores) / groups.sum(lengths).clamp(min=1))
    return _broadcast_over_tokens(scores - baselines, inputs)


@register_advantage_estimator("gpg")
def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-centred scores scaled up by the rows without a signal (GPG, arXiv:2504.02546).

    A = α (s − mean_g) with α = rows / max(1, rows whose score is not 0), over the batch; the mean of a group
    of one is taken as 0.

    Returns:
        Advantages and returns, equal, in units of reward, [B, T].
    """
    groups = required_groups(inputs, "gpg")
    scores = group_scores(inputs, groups)
    with_signal = (groups.is_counted & (scores != 0)).sum()
    return _broadcast_over_tokens(
        _centred(groups, scores) * groups.is_counted.sum() / with_signal.clamp(min=1), inputs
    )


@register_advantage_estimator("gdpo")
def gdpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Normalise each part of the reward within its group before adding them up (GDPO, arXiv:2601.05242).

    A = Σ_k w_k (s_k − mean_g) / (std_g + 1e-6) on every response token, then whitened over the batch's
    response tokens; the only row of a group has (s_k − 0) / (1 + 1e-6) in the place of the fraction.

    Returns:
        Advantages and returns, equal, dimensionless, [B, T].

    Raises:
        ValueError: when ``component_scores`` is missing, or scores and weights do not fit the rows and each
            other.
    """
    groups = required_groups(inputs, "gdpo")
    parts = required(inputs.component_scores, "component_scores", "gdpo")
    weights = [1.0] * parts.shape[-1] if inputs.component_weights is None else list(inputs.component_weights)
    if parts.ndim != 2 or parts.shape[0] != inputs.response_mask.shape[0] or parts.shape[1] != len(weights):
        raise ValueError(
            f"component_scores must be [B, K] with B = {inputs.response_mask.shape[0]} rows and one weight "
            f"(algorithm.gdpo_reward_weights) per component; got {tuple(parts.shape)} and {len(weights)} "
            "weights"
        )
    normalised = [
        _normalised(groups, groups.without_rounding(part, part.abs()))
        for part in parts.to(torch.float64).unbind(dim=-1)
    ]
    total = torch.stack([weight * part for weight, part in zip(weights, normalised, strict=True)]).sum(dim=0)
    return _broadcast_over_tokens(total, inputs)


def _compared(
    compare: Callable[[Groups, Tensor], Tensor], inputs: AdvantageInputs, estimator: str
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, equal, [B, T]: ``compare`` gets the groups and their scores, those of rows or,
    with credit by turn, of turns.

    The score of a turn is the sum of the rewards from its first token on; its group are the turns of the same
    number of all rows of the prompt. Alone in it a turn gets 0: what a late turn gets that no other row has
    reached can be compared with nothing.
    """
    groups, mask = required_groups(inputs, estimator), inputs.response_mask
    if not inputs.credits_turns:
        return _broadcast_over_tokens(compare(groups, group_scores(inputs, groups)), inputs)
    # ``most``: a bound of the number of turns that needs no look at the mask. A reward on tokens of the
    # environment belongs to the turn before them.
    turns, most = turn_numbers(mask), (mask.shape[1] + 1) // 2
    rewards = zero_nonfinite_outside(inputs.token_level_rewards, mask).double()
    per_turn = rewards.new_zeros((len(mask), most))
    to_go, sizes = (
        per_turn.scatter_add(-1, turns, terms).flip(-1).cumsum(dim=-1).flip(-1)
        for terms in (rewards, rewards.abs())
    )
    has_tokens = per_turn.scatter_add(-1, turns, mask.double()) > 0
    members = groups.group_of_row[:, None] * most + torch.arange(most, device=mask.device)
    by_turn = Groups(members.flatten(), has_tokens.flatten(), groups.num_groups * most)
    credits = (
        compare(by_turn, by_turn.without_rounding(to_go.flatten(), sizes.flatten()))
        .where(by_turn.sizes(torch.float64) > 1, 0)
        .view(-1, most)
    )
    advantages = torch.where(mask, credits.gather(-1, turns).to(inputs.token_level_rewards.dtype), 0)
    return advantages, advantages


def _leave_one_out(groups: Groups, scores: Tensor) -> Tensor:
    """Scores minus the mean of the other scores of their group; the only row of a group keeps its score."""
    sizes = groups.sizes(scores.dtype)
    left_out = (scores - groups.means(scores)) * sizes / (sizes - 1).clamp(min=1)
    return left_out.where(sizes > 1, scores)


def _centred(groups: Groups, scores: Tensor) -> Tensor:
    """Scores minus the mean of their group; the mean of a group of one is taken as 0."""
    return scores - groups.means(scores).where(groups.sizes(scores.dtype) > 1, 0)


def _normalised(groups: Groups, scores: Tensor) -> Tensor:
    """Centred scores over their group's standard deviation; that of a group of one is taken as 1."""
    scale = groups.stds(scores).where(groups.sizes(scores.dtype) > 1, scores.new_ones(()))
    return _centred(groups, scores) / (scale + STD_EPSILON)


def _broadcast_over_tokens(row_advantages: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Broadcast each row's advantage [B] to its response tokens; the returns are the same."""
    per_row = row_advantages.to(inputs.token_level_rewards.dtype).unsqueeze(-1)
    advantages = torch.where(inputs.response_mask, per_row, 0)
    return advantages, advantages


WEIGHT_EPSILON = 1e-8
"""Added to a group's sum of weights, dimensionless."""


@register_advantage_estimator("optimal_token_baseline")
def optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Returns-to-go minus the variance-optimal baseline of each position (OTB, arXiv:2602.07078).

    w_t = 1 − 2 π_t + Σ_v π_v², the expected squared norm of the token's gradient with respect to the logits,
    times ρ_t² when there are importance weights; W_t = Σ_{u ≤ t} w_u; B_t = Σ_j W_t^j G_t^j / (Σ_j W_t^j +
    1e-8) over the group's rows that have a response token at t; A = G − B. Where fewer than two rows have
    one, B is 0: a row alone would cancel itself.

    Returns:
        Advantages and returns G, in units of reward, [B, T].
    """
    groups = required_groups(inputs, "optimal_token_baseline")
    old_log_probs = required(inputs.old_log_probs, "old_log_probs", "optimal_token_baseline")
    sum_pi_squared = required(inputs.sum_pi_squared, "sum_pi_squared", "optimal_token_baseline")
    mask = inputs.response_mask
    returns = returns_to_go(inputs.token_level_rewards, mask, 1.0)
    gradient_norms = 1 - 2 * old_log_probs.exp() + sum_pi_squared
    gradient_norms = gradient_norms.where(gradient_norms.isfinite(), 0)
    if inputs.rollout_is_weights is not None:
        gradient_norms = gradient_norms * inputs.rollout_is_weights.square()
    weights = gradient_norms.to(returns.dtype).where(mask, 0).cumsum(dim=-1).where(mask, 0)
    baselines = groups.sum(weights * returns) / (groups.sum(weights) + WEIGHT_EPSILON)
    shared = groups.sum(mask.to(returns.dtype)) > 1
    row_baselines = groups.per_row(baselines.where(shared, 0))
    return (returns - row_baselines).where(mask, 0), returns


@register_advantage_estimator("tir_optimal_token_baseline")
def tir_optimal_token_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """``optimal_token_baseline`` on response tokens lined up across turns, for answers with tool output in
    between.

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
        old_log_probs=order.pack(
            required(inputs.old_log_probs, "old_log_probs", "tir_optimal_token_baseline")
        ),
        sum_pi_squared=order.pack(
            required(inputs.sum_pi_squared, "sum_pi_squared", "tir_optimal_token_baseline")
        ),
        rollout_is_weights=None if weights is None else order.pack(weights),
    )
    advantages, returns = optimal_token_baseline(packed)
    return order.unpack(advantages), order.unpack(returns)


def informative_groups(values: Sequence[float], group_ids: Sequence[int]) -> list[int]:
    """Groups whose samples do not all have the same value, but for rounding, in order of appearance (DAPO,
    arXiv:2503.14476).

    ``values`` and ``group_ids`` hold one entry per sample. Advantages that compare samples of one prompt are
    0 in all other groups. A sample alone in its group counts as informative: there is nothing it could equal.
    """
    values_by_group: dict[int, list[float]] = {}
    for group, value in zip(group_ids, values, strict=True):
        values_by_group.setdefault(group, []).append(value)
    return [
        group
        for group, group_values in values_by_group.items()
        if len(group_values) == 1 or not _are_equal(torch.tensor(group_values, dtype=torch.float64))
    ]


def _are_equal(values: Tensor) -> bool:
    return bool(is_rounding(values.amax() - values.amin(), values.abs().amax()))
