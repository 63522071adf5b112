"""Check of the parameters of vLLM's functions that this package replaces or calls."""

import inspect
from collections.abc import Callable
from typing import Any


def require_parameters(function: Callable[..., Any], expected: list[str], purpose: str) -> None:
    """Raise ``RuntimeError`` when ``function`` has other parameters than ``expected``; ``purpose`` says in
    the message what verl_rc does through it."""
    parameters = list(inspect.signature(function).parameters)
    if parameters != expected:
        raise RuntimeError(
            f"verl_rc {purpose} through vLLM's {function.__qualname__}, which must have the parameters "
            f"{expected}, got {parameters}. Install the version of vLLM that pyproject.toml names."
        )
