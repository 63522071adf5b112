"""The function that runs an advantage estimator by its name."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from verl_rc.algorithm.advantage import group_relative, returns  # noqa: F401  (they bind functions to names)
from verl_rc.algorithm.advantage.inputs import (
    AdvantageInputs,
    Groups,
    make_groups,
    resolve_advantage_estimator,
)
from verl_rc.algorithm.advantage.returns import whitened
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS


def compute_advantages(  # noqa: PLR0913 - a public entry point, called with keywords
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Sequence[Hashable] | Tensor | None = None,
    values: Tensor | None = None,
    reward_baselines: Tensor | None = None,
    included_rows: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    turn_credit: Literal["episode", "turn"] = "episode",
    component_scores: Tensor | None = None,
    component_weights: Sequence[float] | None = None,
    old_log_probs: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    *,
    is_whole: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns of a whole batch, without gradient.

    Both are 0 outside the response; NaN in any input outside the response is harmless. A finite reward
    outside the response (tool output after the last token of the policy) is credited to the response token
    before it. Rows without a response token (padding) are ignored.

    Args:
        name: a registered estimator (``advantage_estimator_names``) or ``module:function``.
        token_level_rewards: [B, T], in units of reward.
        response_mask: [B, T], bool or 0/1; tokens the policy produced, before any rejection.
        group_ids: the prompt of each row; B strings or integers, or an integer tensor [B].
        values: [B, T], in units of reward; needed by ``gae``.
        reward_baselines: [B], in units of reward; score of the greedy answer; needed by ``remax``.
        included_rows: [B], bool; rows that enter baselines and whitening; all when None. The others get 0,
            and so does a row whose group has no other one left. Only for estimators that compare groups.
        gamma: discount per response token, in [0, 1].
        lam: decay of GAE per response token, in [0, 1].
        norm_adv_by_std_in_grpo: whether ``grpo`` divides by the group's standard deviation.
        turn_credit: whether ``grpo``, ``rloo`` and ``reinforce_plus_plus_baseline`` credit a turn (a run of
            response tokens) with the rewards of its row, or with those from that turn on.
        component_scores: [B, K], in units of reward; needed by ``gdpo``.
        component_weights: K factors for ``gdpo``; 1 each when None.
        old_log_probs: [B, T], nats; needed by the optimal token baselines.
        sum_pi_squared: [B, T]; Σ_v π(v)²; needed by the optimal token baselines.
        rollout_is_weights: [B, T]; used by the optimal token baselines.
        is_whole: whether these rows are the whole batch; False leaves ``whitened`` to the caller.

    Returns:
        Advantages [B, T] and returns [B, T], in units of reward unless the estimator normalises.

    Raises:
        ValueError: for an unknown name, unequal shapes, a missing input, or discounts outside [0, 1].
    """
    _check_shapes(
        token_level_rewards, response_mask, values, old_log_probs, sum_pi_squared, rollout_is_weights
    )
    for key, number in (("gamma", gamma), ("lam", lam)):
        if not 0 <= number <= 1:
            raise ValueError(f"algorithm.{key} must be in [0, 1], got {number}")
    spec = ADVANTAGE_ESTIMATORS.get(name)
    if included_rows is not None and (group_ids is None or (spec is not None and not spec.compares_groups)):
        raise ValueError(
            "included_rows leaves rows out of a group's baseline and needs group_ids and an estimator that "
            f"compares groups; got {name!r} {'without' if group_ids is None else 'with'} group_ids. Set "
            "algorithm.rollout_correction.rejected_in_group_baseline=include"
        )
    mask, whitens = response_mask.bool(), spec is not None and spec.whitens
    groups = None if group_ids is None else make_groups(group_ids, mask.any(dim=-1))
    if included_rows is not None and groups is not None:
        mask, groups = _included(mask, groups, included_rows.bool())
    rewards = token_level_rewards.detach().to(torch.promote_types(token_level_rewards.dtype, torch.float32))
    inputs = AdvantageInputs(
        token_level_rewards=rewards,
        response_mask=mask,
        groups=groups,
        values=None if values is None else values.detach().to(rewards.dtype),
        reward_baselines=reward_baselines,
        component_scores=component_scores,
        component_weights=component_weights,
        old_log_probs=old_log_probs,
        sum_pi_squared=sum_pi_squared,
        rollout_is_weights=rollout_is_weights,
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=norm_adv_by_std_in_grpo,
        credits_turns=turn_credit == "turn",
    )
    with torch.no_grad():
        estimated = resolve_advantage_estimator(name)(inputs)
        return whitened(*estimated, mask) if whitens and is_whole else estimated


def _included(mask: Tensor, groups: Groups, included: Tensor) -> tuple[Tensor, Groups]:
    """Mask and groups without the rows that are not ``included``, and without those that they leave alone:
    these can be compared with nothing."""
    left = replace(groups, is_counted=groups.is_counted & included)
    alone = (left.sizes(torch.float64) == 1) & (groups.sizes(torch.float64) > 1)
    left = replace(left, is_counted=left.is_counted & ~alone)
    return mask & left.is_counted.unsqueeze(-1), left


def _check_shapes(rewards: Tensor, response_mask: Tensor, *others: Tensor | None) -> None:
    shapes = [tuple(tensor.shape) for tensor in (response_mask, *others) if tensor is not None]
    if rewards.ndim != 2 or any(shape != tuple(rewards.shape) for shape in shapes):
        raise ValueError(
            "the tensors of an advantage estimator must be [B, T] like token_level_rewards, which is "
            f"{tuple(rewards.shape)}; the others are {shapes}"
        )
