"""Reward functions of the user: loaded from a Python file, checked once, called for every response."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_rc.config.user_code import load_user_module

RewardFunction = Callable[..., Any]
"""``f(data_source, solution_str, ground_truth, extra_info, **reward_kwargs) -> float | {"score": float, ...}``."""

_KEY = "reward.custom_reward_function"
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


def load_reward_function(
    path: str, name: str, reward_kwargs: Mapping[str, Any] | None = None, further_arguments: Sequence[str] = ()
) -> RewardFunction:
    """The function ``name`` of the Python file ``path`` with ``reward_kwargs`` filled in.

    ``further_arguments``: names of keyword arguments that every call has beside the usual ones. An ``async def`` becomes a
    plain function that runs it to its end.
    Raises ``ValueError`` when the file or the function is missing, or when it does not take the arguments it will get.
    """
    module = load_user_module(path, f"{_KEY}.path")
    function = getattr(module, name, None)
    if not callable(function):
        there = sorted(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"{_KEY}.name must name a function of {path}, got {name!r}; its functions are {there}.")
    further = dict(reward_kwargs or {})
    given = [*_ARGUMENTS, *further_arguments]
    try:
        inspect.signature(function).bind(**dict.fromkeys(given), **further)
    except TypeError as error:
        raise ValueError(
            f"{name} of {path} must accept the keyword arguments {', '.join([*given, *further])}, its "
            f"signature is {name}{inspect.signature(function)}: {error}. Change it, or {_KEY}.reward_kwargs "
            f"({sorted(further)})."
        ) from error

    def call(**arguments: Any) -> Any:
        returned = function(**arguments, **further)
        return asyncio.run(_finished(returned)) if inspect.isawaitable(returned) else returned

    return call


async def _finished(awaitable: Any) -> Any:
    return await awaitable
