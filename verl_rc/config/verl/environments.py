"""verl's keys of tools, interactions and agent loops: together they mean one environment."""

from collections.abc import Mapping
from typing import Any

from verl_rc.config.errors import ConfigError

ADAPTER = "verl_rc.runtime.rollout.environments.verl_loops:VerlLoops"
"""The environment that reads verl's files."""
_ROLLOUT = "actor_rollout_ref.rollout"
_TURNS, _AGENT, _ENVIRONMENT = f"{_ROLLOUT}.multi_turn", f"{_ROLLOUT}.agent", f"{_ROLLOUT}.environment"
_FILES = {
    f"{_TURNS}.tool_config_path",
    f"{_TURNS}.function_tool_path",
    f"{_TURNS}.interaction_config_path",
    f"{_AGENT}.agent_loop_config_path",
}
_ARGUMENTS = (
    *sorted(_FILES),
    f"{_AGENT}.default_agent_loop",
    *(
        f"{_TURNS}.{name}"
        for name in (
            *("max_assistant_turns", "max_user_turns", "max_parallel_calls", "tools", "format"),
            *("max_tool_response_length", "tool_response_truncate_side"),
        )
    ),
)
"""Keys that become ``environment.arguments`` by their last name, where a file is given."""
_HAPPENS = "nothing beside one of these files: their loops are chosen by row"
WRITTEN_HERE = {
    **{key: f"the environment's argument `{key.rpartition('.')[2]}`" for key in _ARGUMENTS},
    f"{_TURNS}.tool_timeout_seconds": f"`{_ENVIRONMENT}.step_seconds`",
    f"{_TURNS}.enable": _HAPPENS,
    f"{_AGENT}.num_workers": f"`{_ENVIRONMENT}.hosts`, beside any environment",
}
"""verl's keys and what stands for them here, for the documents."""


def with_environment(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The given leaves, with the environment that verl's files mean and its reward, which is the function's.

    Raises ``ConfigError`` where they name another environment.
    """
    files = sorted(key for key in _FILES if leaves.get(key))
    if not files:
        return dict(leaves)
    name = leaves.get(f"{_ENVIRONMENT}.name", ADAPTER)
    if name != ADAPTER:
        raise ConfigError(
            f"{_ENVIRONMENT}.name={name} and {', '.join(files)} both answer the policy's turns; drop one of "
            "them."
        )
    return {f"{_ENVIRONMENT}.reward": "function", **leaves, f"{_ENVIRONMENT}.name": name}


def translate(key: str, value: Any, leaves: Mapping[str, Any]) -> tuple[bool, tuple[str, Any] | None]:
    """Whether ``key`` belongs to an environment beside all ``leaves``, and its translation: a key and its
    value here, or None if they say what happens anyway."""
    if key == f"{_AGENT}.num_workers" and leaves.get(f"{_ENVIRONMENT}.name"):
        return True, None if value is None else (f"{_ENVIRONMENT}.hosts", value)
    if key in _FILES and not value:
        return True, None
    if key not in WRITTEN_HERE or not any(leaves.get(file) for file in _FILES):
        return False, None
    if key == f"{_TURNS}.enable":
        return True, None
    if key in _ARGUMENTS:
        return True, (f"{_ENVIRONMENT}.arguments.{key.rpartition('.')[2]}", value)
    return True, (f"{_ENVIRONMENT}.step_seconds", value)
