"""Reward functions of the user: loaded from a Python file, checked once, called for every response."""

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

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
    module = _load_module(path)
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


def _load_module(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file() or file.suffix != ".py":
        raise ValueError(f"{_KEY}.path must be an existing Python file, got {path!r}.")
    specification = importlib.util.spec_from_file_location(f"verl_rc_custom_reward_{file.stem}", file)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    try:
        specification.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{_KEY}.path must be a file that can be imported; {path!r} raised {error!r}.") from error
    return module
