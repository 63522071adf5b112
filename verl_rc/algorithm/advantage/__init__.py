"""Advantage estimators as pure functions, one family per file; ``compute_advantages`` is the entry point."""

from verl_rc.algorithm.advantage.estimators import compute_advantages
from verl_rc.algorithm.advantage.inputs import (
    AdvantageEstimator,
    AdvantageInputs,
    advantage_estimator_names,
    register_advantage_estimator,
    resolve_advantage_estimator,
)
from verl_rc.algorithm.advantage.returns import whitened
from verl_rc.algorithm.advantage.reward_shaping import apply_kl_in_reward, episode_scores

__all__ = [
    "AdvantageEstimator",
    "AdvantageInputs",
    "advantage_estimator_names",
    "apply_kl_in_reward",
    "compute_advantages",
    "episode_scores",
    "register_advantage_estimator",
    "resolve_advantage_estimator",
    "whitened",
]
