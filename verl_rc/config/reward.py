"""Where scores come from."""

from typing import Any

from verl_rc.config.base import StrictModel


class CustomRewardFunctionConfig(StrictModel):
    """``reward.custom_reward_function.*``: a function of your own."""

    path: str | None = None
    """Python file that holds it; null: the built-in function of each row's ``data_source``."""
    name: str = "compute_score"
    """Its name: ``f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | dict``."""
    reward_kwargs: dict[str, Any] = {}
    """Further keyword arguments of every call."""


class RewardConfig(StrictModel):
    """``reward.*``."""

    custom_reward_function: CustomRewardFunctionConfig = CustomRewardFunctionConfig()
    """A function of your own."""
