"""verl's agent loops as an environment: its tools and interactions by its own files."""

import asyncio
import json
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.episode import TOOL_CALLS, Message, Opening, Reply, Turn
from verl_rc.rollout.environment import Environment, EpisodeFailedError
from verl_rc.rollout.environments.verl_files import (
    LoadedTool,
    import_class,
    load_interactions,
    load_tools,
    read_list,
)
from verl_rc.rollout.tool_environment import ToolCall, parse_hermes, truncated

_TOOLS, _SINGLE = "tool_agent", "single_turn_agent"
"""verl's own names in the column ``agent_name``."""


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
        """``default_agent_loop``: of rows without a name; None: ``tool_agent``. ``limits``: keys of
        ``multi_turn``.

        Raises ``ValueError`` naming what is wrong in a file, or which limit has no effect.
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
            **_loops_of_file(agent_loop_config_path),
        }
        self._default = default_agent_loop or _TOOLS
        if self._default not in self._loops:
            raise ValueError(
                f"agent.default_agent_loop must be one of {sorted(self._loops)}, got {self._default!r}."
            )
        self._loop: Environment = SingleTurn()

    def __repr__(self) -> str:
        """How messages call it."""
        return repr(self._loop)

    def _begin(self, row: Mapping[str, Any]) -> Environment:
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
        return await self._begin(row).reset(row, seed)

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        return await self._loop.step(turn)

    async def state(self) -> bytes | None:
        """See ``Environment``."""
        return await self._loop.state()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``Environment``."""
        await self._begin(row).restore(row, seed, state)

    async def close(self) -> None:
        """See ``Environment``."""
        await self._loop.close()


@cache
def _loops_of_file(path: str | None) -> Mapping[str, Callable[[], Environment]]:
    """The environments of ``agent_loop_config_path``. Raises ``ValueError`` where a target is none."""
    if not path:
        return {}
    key = f"agent.agent_loop_config_path={path}"
    loops = {}
    for entry in read_list(path, None, key):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or "_target_" not in entry:
            raise ValueError(f"{key}: an entry must have name and _target_, got {str(entry)[:120]!r}.")
        kind, why = None, "."
        try:
            kind = import_class(entry["_target_"], key)
        except ValueError as error:
            why = f". ({error})"
        if not isinstance(kind, type) or not issubclass(kind, Environment):
            raise ValueError(
                f"{key}: {entry['name']} is {entry['_target_']}, which must be a verl_rc.rollout.environment."
                "Environment: an AgentLoopBase of verl's drives the engine itself. Write what it answers to "
                "a turn as an Environment (docs/environments.md), or let it call the chat endpoint as an "
                f"agent (docs/agents.md){why}"
            )
        arguments = {name: value for name, value in entry.items() if name not in ("name", "_target_")}
        loops[entry["name"]] = partial(kind, **arguments)
    return loops


class SingleTurn(Environment):
    """verl's ``single_turn_agent``: the episode is done after a turn."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """The prompt is that of the row, without tools."""

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        return Reply(done=True)


@dataclass
class AgentData:
    """What ``execute`` gets as ``agent_data``: an episode by verl's names, as far as text goes."""

    messages: list[Message]
    """The conversation; ``content`` of the policy's turns has their calls."""
    tools_kwargs: Mapping[str, Any]
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """For tools to write; the reward function finds what is plain JSON of it in its ``extra_info``."""
    turn_scores: list[float] = field(default_factory=list)
    tool_rewards: list[float] = field(default_factory=list)
    assistant_turns: int = 0
    user_turns: int = 0


class ToolLoop(Environment):
    """verl's ``tool_agent``: a turn's calls are answered by tools; a turn without calls by the row's
    interaction, else it ends the episode.

    Rewards of tools and scores of interactions are the rewards of turns, and reach the reward function as
    ``tool_rewards`` and ``turn_scores`` of ``extra_info``.
    """

    def __init__(
        self, tools: Mapping[str, LoadedTool], interactions: Mapping[str, Any], limits: MultiTurnConfig
    ) -> None:
        self._tools, self._interactions, self._limits = tools, interactions, limits
        self._interaction: Any = None
        self._interaction_kwargs: Mapping[str, Any] = {}
        self._has_started = False

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Environment``. Raises ``EpisodeFailedError`` when the row lacks its interaction."""
        self._take(row)
        schemas = [tool.schema for tool in self._tools.values()]
        return Opening(row["prompt"], schemas) if schemas else None

    def _take(self, row: Mapping[str, Any]) -> None:
        facts = row.get("extra_info") or {}
        if selection := facts.get("tool_selection"):
            self._tools = {name: self._tools[name] for name in selection if name in self._tools}
        self._data = AgentData(list(row["prompt"]), facts.get("tools_kwargs") or {})
        if not self._interactions:
            return
        self._interaction_kwargs = facts.get("interaction_kwargs") or {}
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
        if not turn.token_ids:  # a limit has ended the episode behind the last turn
            return Reply(done=True, extra_info=self._facts())
        data.assistant_turns = turn.number + 1
        data.messages.append({"role": "assistant", "content": turn.text})
        calls = [call for call in parse_hermes(turn.text) if isinstance(call, ToolCall)]
        asks = bool(calls) or self._interaction is not None
        at_limit = turn.number + 1 == limits.max_assistant_turns or turn.number == limits.max_user_turns
        if not turn.stopped or at_limit or not asks:
            return Reply(done=True, truncated=asks and at_limit, extra_info=self._facts())
        data.user_turns = turn.number + 1
        if calls:
            return await self._answer(calls[: limits.max_parallel_calls])
        return await self._interact()

    async def _answer(self, calls: list[ToolCall]) -> Reply:
        answers = await asyncio.gather(*map(self._call, calls))
        limit, side = self._limits.max_tool_response_length, self._limits.tool_response_truncate_side
        messages = [{"role": "tool", "content": truncated(text, limit, side)} for text, _, _ in answers]
        rewards = [reward for _, reward, _ in answers if reward is not None]
        self._data.messages += messages
        self._data.tool_rewards += rewards
        metrics = {TOOL_CALLS: float(len(calls)), "tool_errors": float(sum(failed for *_, failed in answers))}
        return Reply(messages, math.fsum(rewards), metrics=metrics, extra_info=self._facts())

    async def _call(self, call: ToolCall) -> tuple[str, float | None, bool]:
        """What the policy reads, the reward, and whether the tool raised."""
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: the tools are {json.dumps(sorted(self._tools))}", 0.0, False
        kwargs = (self._data.tools_kwargs.get(call.name) or {}).get("create_kwargs") or {}
        answering = tool.call(call.arguments, kwargs, self._data)
        (outcome,) = await asyncio.gather(answering, return_exceptions=True)
        if isinstance(outcome, BaseException):  # which the policy reads, as in verl
            return f"error: {call.name} failed: {outcome}", 0.0, True
        response, reward = outcome
        text = getattr(response, "text", response) or ""
        pictures = getattr(response, "image", None) or getattr(response, "video", None)
        if pictures or not isinstance(text, str):
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
        return Reply(messages, float(score or 0), bool(is_done), metrics=metrics, extra_info=self._facts())

    def _facts(self) -> dict[str, Any]:
        """What the reward function gets."""
        data = self._data
        plain = {name: value for name, value in data.extra_fields.items() if _is_plain(value)}
        return {**plain, "turn_scores": list(data.turn_scores), "tool_rewards": list(data.tool_rewards)}

    async def state(self) -> bytes | None:
        """Tools hold nothing between calls but what they write into ``extra_fields``; where that is no plain
        JSON, and with an interaction, the turns are played again."""
        facts = vars(self._data)
        if self._interaction is not None or not _is_plain(facts):
            return None
        return json.dumps(facts).encode()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``Environment``."""
        self._take(row)
        self._data = AgentData(**json.loads(state))

    async def close(self) -> None:
        """Let the interaction free what it holds; verl never does, so it may have no such method."""
        if self._has_started and hasattr(self._interaction, "finalize_interaction"):
            await self._interaction.finalize_interaction(self._data.request_id)


def _is_plain(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
