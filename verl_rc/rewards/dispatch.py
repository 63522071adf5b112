"""Which function scores a response: the user's own, or the built-in one of the row's ``data_source``."""

from collections.abc import Callable
from typing import Any

from verl_rc.config.reward import RewardConfig
from verl_rc.data.dataset import PromptRow
from verl_rc.rewards.custom import load_reward_function
from verl_rc.rewards.exact_match import exact_match
from verl_rc.rewards.gsm8k import gsm8k
from verl_rc.rewards.math_answer import dapo_math, math_answer
from verl_rc.rewards.output import RewardOutput, as_reward_output

Scorer = Callable[[str, Any], Any]
"""``f(solution_str, ground_truth)`` returns a number or a dict with ``score``."""

_SCORERS: dict[str, Scorer] = {
    "digits": exact_match,
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math_answer,
    "DigitalLearningGmbH/MATH-lighteval": math_answer,
    "HuggingFaceH4/MATH-500": math_answer,
    "math": dapo_math,
    "math_dapo": dapo_math,
    "math_dapo_reasoning": dapo_math,
}
_FAMILIES: dict[str, Scorer] = {"aime": dapo_math, "numina_": math_answer}
"""Scorers of all sources whose name starts so."""


def register_scorer(data_source: str) -> Callable[[Scorer], Scorer]:
    """Decorator: the function below it scores rows of ``data_source``. Raises ``ValueError`` when the name is taken."""

    def register(scorer: Scorer) -> Scorer:
        if _SCORERS.setdefault(data_source, scorer) is not scorer:
            raise ValueError(f"data_source {data_source!r} already has a scorer; choose another name.")
        return scorer

    return register


def find_scorer(data_source: str) -> Scorer:
    """The scorer of a ``data_source``. Raises ``ValueError`` for an unknown one, listing those known."""
    if data_source in _SCORERS:
        return _SCORERS[data_source]
    for prefix, scorer in _FAMILIES.items():
        if data_source.startswith(prefix):
            return scorer
    known = sorted([*_SCORERS, *(f"{prefix}*" for prefix in _FAMILIES)])
    raise ValueError(
        f"data_source must be one that has a scorer, got {data_source!r}; known are {known}. "
        "Name a function of your own with reward.custom_reward_function.path and reward.custom_reward_function.name."
    )


def build_reward(config: RewardConfig) -> Callable[[PromptRow, str], RewardOutput]:
    """The function that scores a response to a prompt; an error names the row it happened on.

    Raises ``ValueError`` at once when a function of the user's own is configured and cannot be loaded.
    """
    custom = config.custom_reward_function
    function = None if custom.path is None else load_reward_function(custom.path, custom.name, custom.reward_kwargs)

    def reward(row: PromptRow, solution_str: str) -> RewardOutput:
        sample = f"row {row.row_index} (data_source {row.data_source!r}, response {solution_str[:80]!r})"
        try:
            if function is None:
                returned = find_scorer(row.data_source)(solution_str, row.ground_truth)
            else:
                returned = function(
                    data_source=row.data_source,
                    solution_str=solution_str,
                    ground_truth=row.ground_truth,
                    extra_info=row.extra_info,
                )
        except Exception as error:
            error.add_note(f"This happened while the reward function scored {sample}.")
            raise
        return as_reward_output(returned, sample)

    return reward
