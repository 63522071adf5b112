"""Scoring response texts: built-in scorers, reward functions of the user's own, and the choice between them.
Pure functions."""

from verl_rc.algorithm.rewards.dispatch import (
    build_reward,
    check_data_sources,
    find_scorer,
    load_reward_function,
    register_scorer,
    score_on_timeout,
)
from verl_rc.algorithm.rewards.sample import (
    ENVIRONMENT_PREFIX,
    FAILURE_COLUMN,
    OVERLONG_COLUMNS,
    RewardError,
    RewardOutput,
    RewardSample,
    as_reward_output,
)
from verl_rc.algorithm.rewards.scorers import (
    dapo_math,
    exact_match,
    geometry,
    gsm8k,
    last_answer,
    math_answer,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "FAILURE_COLUMN",
    "OVERLONG_COLUMNS",
    "RewardError",
    "RewardOutput",
    "RewardSample",
    "as_reward_output",
    "build_reward",
    "check_data_sources",
    "dapo_math",
    "exact_match",
    "find_scorer",
    "geometry",
    "gsm8k",
    "last_answer",
    "load_reward_function",
    "math_answer",
    "register_scorer",
    "score_on_timeout",
]
