"""Finding tools by their names."""

import importlib
from collections.abc import Sequence

from verl_rc.config.nearest import nearest_key
from verl_rc.rewards.tools.calculator import CALCULATOR
from verl_rc.rewards.tools.tool import Tool

BUILT_IN = {CALCULATOR.name: CALCULATOR}
"""Tools that are part of this package."""


def find_tools(names: Sequence[str]) -> dict[str, Tool]:
    """The tools called ``names``, built in or ``module:attribute`` of the user's own, by the name they have.

    Raises ``ValueError`` when there is no such tool, or two have one name.
    """
    tools: dict[str, Tool] = {}
    for name in names:
        tool = _imported(name) if ":" in name else BUILT_IN.get(name)
        if tool is None:
            raise ValueError(
                f"actor_rollout_ref.rollout.multi_turn.tools must name tools among {sorted(BUILT_IN)} or module:attribute, got "
                f"{name!r}; the nearest is {nearest_key(name, list(BUILT_IN))}."
            )
        if tool.name in tools:
            raise ValueError(f"actor_rollout_ref.rollout.multi_turn.tools must have different names, got two {tool.name!r}.")
        tools[tool.name] = tool
    return tools


def _imported(name: str) -> Tool:
    module_name, _, attribute = name.partition(":")
    key = f"actor_rollout_ref.rollout.multi_turn.tools={name}"
    try:
        tool = getattr(importlib.import_module(module_name), attribute, None)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{key} cannot be imported: {error!r}. The module must be on PYTHONPATH.") from error
    if not isinstance(tool, Tool):
        raise ValueError(f"{key} must be a verl_rc.rewards.tools.Tool, got {tool!r}.")
    return tool
