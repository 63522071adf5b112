"""That functions of vLLM which are replaced or called here are those that were read."""

import inspect
from collections.abc import Callable
from typing import Any


def require_parameters(function: Callable[..., Any], expected: list[str], purpose: str) -> None:
    """Raise ``RuntimeError`` when ``function``, through which verl_rc does what ``purpose`` says, has other
    parameters than ``expected``."""
    found = list(inspect.signature(function).parameters)
    if found != expected:
        raise RuntimeError(
            f"verl_rc {purpose} through vLLM's {function.__qualname__}, which must have the parameters "
            f"{expected}, got {found}. Install the version of vLLM that pyproject.toml names."
        )
