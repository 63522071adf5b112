"""Tools as an environment: how a policy writes calls, and what it reads after them."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.episode import TOOL_CALLS, Reply, Turn
from verl_rc.rollout.environment import Environment
from verl_rc.rollout.tools import Tool, call_tool, find_tools

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]


ParsedCall = ToolCall | str
"""A call; or what is wrong with something that is marked as one, in words for the policy."""
Parser = Callable[[str], list[ParsedCall]]
"""Parses the text of a turn into its calls, in order."""


def parse_hermes(text: str) -> list[ParsedCall]:
    """Calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen chat
    templates."""
    return [_hermes_call(body) for body in _HERMES.findall(text)]


def _hermes_call(body: str) -> ParsedCall:
    try:
        call = json.loads(body)
    # A policy writes anything: deeply nested JSON ends in a RecursionError.
    except (ValueError, RecursionError):
        return "a tool call must be JSON"
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or not isinstance(call.get("arguments"), dict)
    ):
        return "a tool call must be an object with a name and arguments"
    return ToolCall(call["name"], call["arguments"])


def tag_parser(tool: Tool) -> Parser:
    """Calls ``<tool>text</tool>`` of the one tool there is, whose one argument is the text: short, for small
    models."""
    (argument,) = tool.parameters
    return lambda text: [ToolCall(tool.name, {argument: body}) for body in _TAG.findall(text)]


def choose_parser(config: MultiTurnConfig, tools: Mapping[str, Tool]) -> Parser:
    """The parser of ``multi_turn.format``. Raises ``ValueError`` when the tools do not fit the format."""
    if config.format == "hermes":
        return parse_hermes
    chosen = list(tools.values())
    if len(chosen) != 1 or len(chosen[0].parameters) != 1:
        raise ValueError(
            "actor_rollout_ref.rollout.multi_turn.format=tag needs one tool with one argument in "
            f"multi_turn.tools, got {[tool.name for tool in chosen]}; pass format=hermes."
        )
    return tag_parser(chosen[0])


def answer_call(call: ParsedCall, tools: Mapping[str, Tool], timeout_seconds: float) -> str:
    """What the policy reads after a call: the tool's answer, or what is wrong with the call.

    Raises ``ToolFailedError`` when the tool itself fails, or hangs.
    """
    if isinstance(call, str):
        return f"error: {call}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: the tools are {json.dumps(sorted(tools))}"
    return call_tool(tool, call.arguments, timeout_seconds)


def truncated(text: str, limit: int, side: str) -> str:
    """``text`` cut to ``limit`` characters and marked where it is cut: on its left or right ``side``, or in
    the ``middle``."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + "...(truncated)"
    tail = limit // 2
    return text[: limit - tail] + "...(truncated)..." + text[len(text) - tail :]


_TURNS_AT_ONCE = 64
"""Turns of one process whose tools work at the same time; further ones wait."""


class Toolbox:
    """The tools of a run, and the threads that call them: one for all episodes of a process."""

    def __init__(self, config: MultiTurnConfig) -> None:
        """Raises ``ValueError`` when a tool is unknown, or tools and format do not fit together."""
        self.config = config
        self._tools = find_tools(config.tools)
        self._parse: Parser = choose_parser(config, self._tools)
        self._pool = ThreadPoolExecutor(_TURNS_AT_ONCE, "tools")

    def calls(self, text: str) -> list[ParsedCall]:
        """The calls in the text of a turn that are to be answered."""
        return self._parse(text)[: self.config.max_parallel_calls]

    async def answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """What the policy reads after calls, one text for each. Raises ``ToolFailedError`` when a tool fails
        or hangs."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, calls)

    def _answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """Answer calls one after the other."""
        limit, side = self.config.max_tool_response_length, self.config.tool_response_truncate_side
        seconds = self.config.tool_timeout_seconds
        return [truncated(answer_call(call, self._tools, seconds), limit, side) for call in calls]


class ToolEnvironment(Environment):
    """Answers the tool calls of a turn; the episode is done when a turn calls no tool.

    It is cut off when a call is left at ``max_assistant_turns`` or ``max_user_turns``.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """The prompt is that of the row, with the tools' descriptions in the arguments of the template."""

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. Raises ``ToolFailedError`` when a tool fails or hangs."""
        calls = self._toolbox.calls(turn.text) if turn.stopped else []
        config = self._toolbox.config
        if not calls:
            return Reply(done=True)
        if turn.number + 1 == config.max_assistant_turns or turn.number == config.max_user_turns:
            return Reply(truncated=True)
        answers = await self._toolbox.answer(calls)
        messages = [{"role": "tool", "content": text} for text in answers]
        return Reply(messages, metrics={TOOL_CALLS: float(len(answers))})

    async def state(self) -> bytes:
        """Tools keep nothing between two calls."""
        return b""

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``state``."""


def template_arguments(config: MultiTurnConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template for every prompt: ``arguments``, and with ``format=hermes`` the
    descriptions of the tools.

    Raises ``ValueError`` when a tool is unknown.
    """
    if config.format != "hermes" or not config.enable:
        return dict(arguments)
    return {"tools": [tool.schema() for tool in find_tools(config.tools).values()], **arguments}
