"""verl's agent loops as an environment, with the tools and interactions of verl's files."""

import asyncio
import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.records.episode import TOOL_CALLS, Message, Opening, Reply, Turn
from verl_rc.runtime.rollout.environment import Environment, EpisodeFailedError
from verl_rc.runtime.rollout.environments.verl_files import (
    LoadedTool,
    import_class,
    load_interactions,
    load_tools,
    read_list,
)
from verl_rc.runtime.rollout.tool_environment import ToolCall, parse_hermes, tool_roles, truncate_text

_TOOLS, _SINGLE = "tool_agent", "single_turn_agent"
"""verl's names in the column ``agent_name``."""


class VerlLoops(Environment):
    """The loop that the column ``agent_name`` names: ``tool_agent`` (tools and interactions),
    ``single_turn_agent``, or an environment of the file ``agent_loop_config_path``."""

    def __init__(
        self,
        tool_config_path: str | None = None,
        function_tool_path: str | None = None,
        interaction_config_path: str | None = None,
        agent_loop_config_path: str | None = None,
        default_agent_loop: str | None = None,
        **limits: Any,
    ) -> None:
        """``default_agent_loop``: of rows without a name. None means ``tool_agent``. ``limits``: keys of
        ``multi_turn``.

        Raises ``ValueError`` naming the fault of a file, or a limit without effect.
        """
        config = MultiTurnConfig(enable=True, **limits)
        if config.tools or config.format != "hermes":
            raise ValueError(
                "beside verl's files of tools multi_turn.tools must be empty and multi_turn.format=hermes, "
                f"got {config.tools} and {config.format}. Give all tools in the files."
            )
        tools = load_tools(tool_config_path, function_tool_path)
        interactions = load_interactions(interaction_config_path)
        self._loops: dict[str, Callable[[], Environment]] = {
            _TOOLS: lambda: ToolLoop(tools, interactions, config),
            _SINGLE: SingleTurn,
            **_configured_loops(agent_loop_config_path),
        }
        self._default = default_agent_loop or _TOOLS
        if self._default not in self._loops:
            raise ValueError(
                f"agent.default_agent_loop must be one of {sorted(self._loops)}, got {self._default!r}."
            )
        self._loop: Environment = SingleTurn()

    def __repr__(self) -> str:
        """Its name in messages."""
        return repr(self._loop)

    def reply_roles(self) -> list[Sequence[str]] | None:
        """See ``Environment``."""
        roles: list[Sequence[str]] = []
        for loop in self._loops.values():
            kinds = loop().reply_roles()
            if kinds is None:
                return None
            roles += kinds
        return roles

    def _select_loop(self, row: Mapping[str, Any]) -> Environment:
        name = row.get("agent_name") or self._default
        if name not in self._loops:
            raise EpisodeFailedError(
                f"the column agent_name must name one of {sorted(self._loops)}, got {name!r}. Loops of your "
                "own are named in agent.agent_loop_config_path."
            )
        self._loop = self._loops[name]()
        return self._loop

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Environment``."""
        return await self._select_loop(row).reset(row, seed)

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        return await self._loop.step(turn)

    async def state(self) -> bytes | None:
        """See ``Environment``."""
        return await self._loop.state()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``Environment``."""
        await self._select_loop(row).restore(row, seed, state)

    async def close(self) -> None:
        """See ``Environment``."""
        await self._loop.close()


@cache
def _configured_loops(path: str | None) -> Mapping[str, Callable[[], Environment]]:
    """The environments of ``agent_loop_config_path``. Raises ``ValueError`` for any other target."""
    if not path:
        return {}
    key = f"agent.agent_loop_config_path={path}"
    loops = {}
    for entry in read_list(path, None, key):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "_target_" not in entry:
            raise ValueError(f"{key}: an entry must have name and _target_, got {str(entry)[:120]!r}.")
        loop_class, cause = None, "."
        try:
            loop_class = import_class(entry["_target_"], key)
        except ValueError as error:
            cause = f". ({error})"
        if not isinstance(loop_class, type) or not issubclass(loop_class, Environment):
            raise ValueError(
                f"{key}: {entry['name']} is {entry['_target_']}, which must be a "
                f"{Environment.__module__}.Environment: an AgentLoopBase of verl's drives the engine "
                "itself. Write what it answers to a turn as an Environment (docs/tasks.md#environments), or "
                f"let it call the chat endpoint as an agent (docs/tasks.md#agents){cause}"
            )
        arguments = {name: value for name, value in entry.items() if name not in ("name", "_target_")}
        loops[entry["name"]] = partial(loop_class, **arguments)
    return loops


class SingleTurn(Environment):
    """verl's ``single_turn_agent``: the episode is done after a turn."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """The prompt is that of the row, without tools."""

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        return Reply(done=True)

    def reply_roles(self) -> list[Sequence[str]]:
        """See ``Environment``."""
        return []


@dataclass
class AgentData:
    """The ``agent_data`` of ``execute``: the text fields of an episode by verl's names."""

    messages: list[Message]
    """The conversation; ``content`` of the policy's turns includes their tool calls."""
    tools_kwargs: Mapping[str, Any]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Fields that tools write; ``extra_info`` of the reward function has those that are plain JSON."""
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0


class ToolLoop(Environment):
    """verl's ``tool_agent``: tools answer the calls of a turn; the row's interaction answers a turn without
    calls, or else the turn ends the episode.

    Rewards of tools and scores of interactions are the rewards of turns; ``extra_info`` of the reward
    function has them as ``tool_rewards`` and ``turn_scores``.
    """

    def __init__(
        self, tools: Mapping[str, LoadedTool], interactions: Mapping[str, Any], limits: MultiTurnConfig
    ) -> None:
        self._tools, self._interactions, self._limits = tools, interactions, limits
        self._interaction: Any = None
        self._interaction_kwargs: Mapping[str, Any] = {}
        self._has_started = False

    def reply_roles(self) -> list[list[str]]:
        """See ``Environment``."""
        interactions = [["user"]] if self._interactions else []
        return [*(tool_roles(self._limits) if self._tools else ()), *interactions]

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Environment``. Raises ``EpisodeFailedError`` when the row lacks its interaction."""
        self._read_row(row)
        schemas = [tool.schema for tool in self._tools.values()]
        return Opening(row["prompt"], schemas) if schemas else None

    def _read_row(self, row: Mapping[str, Any]) -> None:
        extra_info = row.get("extra_info") or {}
        if selection := extra_info.get("tool_selection"):
            self._tools = {name: self._tools[name] for name in selection if name in self._tools}
        self._data = AgentData(list(row["prompt"]), extra_info.get("tools_kwargs") or {})
        if not self._interactions:
            return
        self._interaction_kwargs = extra_info.get("interaction_kwargs") or {}
        name = str(self._interaction_kwargs.get("name"))
        if name not in self._interactions:
            raise EpisodeFailedError(
                "extra_info.interaction_kwargs.name of a row must be one of the interactions "
                f"{sorted(self._interactions)}, got {name!r}."
            )
        self._interaction = self._interactions[name]

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        data, limits = self._data, self._limits
        if not turn.token_ids:  # a limit has ended the episode after the last turn
            return Reply(done=True, extra_info=self._reward_info())
        data.assistant_turns = turn.number + 1
        data.messages.append({"role": "assistant", "content": turn.text})
        calls = [call for call in parse_hermes(turn.text) if isinstance(call, ToolCall)]
        expects_reply = bool(calls) or self._interaction is not None
        at_limit = turn.number + 1 == limits.max_assistant_turns or turn.number == limits.max_user_turns
        if not turn.stopped or at_limit or not expects_reply:
            return Reply(done=True, truncated=expects_reply and at_limit, extra_info=self._reward_info())
        data.user_turns = turn.number + 1
        if calls:
            return await self._answer(calls[: limits.max_parallel_calls])
        return await self._interact()

    async def _answer(self, calls: list[ToolCall]) -> Reply:
        answers = await asyncio.gather(*map(self._call, calls))
        limit, side = self._limits.max_tool_response_length, self._limits.tool_response_truncate_side
        messages = [{"role": "tool", "content": truncate_text(text, limit, side)} for text, _, _ in answers]
        rewards = [reward for _, reward, _ in answers if reward is not None]
        self._data.messages += messages
        self._data.tool_rewards += rewards
        metrics = {TOOL_CALLS: float(len(calls)), "tool_errors": float(sum(failed for *_, failed in answers))}
        return Reply(messages, math.fsum(rewards), metrics=metrics, extra_info=self._reward_info())

    async def _call(self, call: ToolCall) -> tuple[str, float | None, bool]:
        """The tool's answer, its reward, and whether it raised."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: the tools are {json.dumps(sorted(self._tools))}", 0.0, False
        kwargs = (self._data.tools_kwargs.get(call.name) or {}).get("create_kwargs") or {}
        execution = tool.call(call.arguments, kwargs, self._data)
        (outcome,) = await asyncio.gather(execution, return_exceptions=True)
        if isinstance(outcome, BaseException):  # which the policy reads, as in verl
            return f"error: {call.name} failed: {outcome}", 0.0, True
        response, reward = outcome
        text = getattr(response, "text", response) or ""
        media = getattr(response, "image", None) or getattr(response, "video", None)
        if media or not isinstance(text, str):
            raise EpisodeFailedError(
                f"the tool {call.name!r} must answer with text alone, got {response!r:.200}."
            )
        return text, None if reward is None else float(reward), False

    async def _interact(self) -> Reply:
        data = self._data
        if not self._has_started:
            await self._interaction.start_interaction(data.request_id, **self._interaction_kwargs)
            self._has_started = True
        is_done, text, score, _ = await self._interaction.generate_response(
            data.request_id, list(data.messages), **self._interaction_kwargs
        )
        message = {"role": "user", "content": text}
        data.messages.append(message)
        if score is not None:
            data.turn_scores.append(float(score))
        metrics = {} if score is None else {"turn_score": float(score)}
        messages = [] if is_done else [message]
        return Reply(
            messages, float(score or 0), bool(is_done), metrics=metrics, extra_info=self._reward_info()
        )

    def _reward_info(self) -> dict[str, Any]:
        """``extra_info`` of the reward function."""
        data = self._data
        plain = {name: value for name, value in data.extra_fields.items() if _is_plain(value)}
        return {**plain, "turn_scores": list(data.turn_scores), "tool_rewards": list(data.tool_rewards)}

    async def state(self) -> bytes | None:
        """See ``Environment``. The state of tools is ``extra_fields``; with an interaction, or where that is
        no plain JSON, the turns are replayed."""
        fields = vars(self._data)
        if self._interaction is not None or not _is_plain(fields):
            return None
        return json.dumps(fields).encode()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``Environment``."""
        self._read_row(row)
        self._data = AgentData(**json.loads(state))

    async def close(self) -> None:
        """Let the interaction free its resources; verl never does, so the method is optional."""
        if self._has_started and hasattr(self._interaction, "finalize_interaction"):
            await self._interaction.finalize_interaction(self._data.request_id)


def _is_plain(value: Any) -> bool:
    """Whether JSON preserves a value."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
