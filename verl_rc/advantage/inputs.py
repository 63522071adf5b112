"""What every advantage estimator is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from verl_rc.advantage.groups import Groups


@dataclass(frozen=True)
class AdvantageInputs:
    """The batch as an estimator sees it.

    Attributes:
        token_level_rewards: [B, T], in units of reward; finite wherever it is not padding.
        response_mask: [B, T], bool; tokens that get an advantage. Rows left out of the baseline have none.
        groups: rows of the same prompt, or None when the caller gave none.
        values: [B, T], in units of reward; the critic's estimate before each token.
        reward_baselines: [B], in units of reward; the score of each prompt's greedy answer.
        component_scores: [B, K], in units of reward; the parts of a reward that is normalised part by part.
        component_weights: K dimensionless factors of these parts; None means 1 each.
        old_log_probs: [B, T], nats; of the policy before the update.
        sum_pi_squared: [B, T], dimensionless; Σ_v π(v)² over the vocabulary at each position.
        rollout_is_weights: [B, T], dimensionless; importance weights of the correction.
        gamma: discount per response token, in [0, 1].
        lam: decay of GAE per response token, in [0, 1].
        norm_adv_by_std_in_grpo: whether ``grpo`` divides by the group's standard deviation.
    """

    token_level_rewards: Tensor
    response_mask: Tensor
    groups: Groups | None = None
    values: Tensor | None = None
    reward_baselines: Tensor | None = None
    component_scores: Tensor | None = None
    component_weights: Sequence[float] | None = None
    old_log_probs: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    rollout_is_weights: Tensor | None = None
    gamma: float = 1.0
    lam: float = 1.0
    norm_adv_by_std_in_grpo: bool = True


AdvantageEstimator: TypeAlias = Callable[[AdvantageInputs], tuple[Tensor, Tensor]]


def required(value: Tensor | None, name: str, estimator: str) -> Tensor:
    """Returns an optional input that this estimator cannot do without.

    Raises:
        ValueError: when it is None.
    """
    if value is None:
        raise ValueError(f"the advantage estimator {estimator!r} needs {name}; pass {name}=...")
    return value


def required_groups(inputs: AdvantageInputs, estimator: str) -> Groups:
    """Returns the groups for an estimator that compares rows of one prompt.

    Raises:
        ValueError: when the caller gave no group identifiers.
    """
    if inputs.groups is None:
        raise ValueError(f"the advantage estimator {estimator!r} compares answers to one prompt; pass group_ids=...")
    return inputs.groups
