"""Tools as an environment: formats of the policy's calls, and their answers."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.records.episode import TOOL_CALLS, Reply, Turn
from verl_rc.runtime.rollout.environment import Environment
from verl_rc.runtime.rollout.tools import Tool, call_tool, find_tools


@dataclass(frozen=True)
class ToolCall:
    """One tool call of a turn."""

    name: str
    arguments: Mapping[str, Any]


ParsedCall = ToolCall | str
"""A call, or the error message of a malformed one for the policy."""
Parser = Callable[[str], list[ParsedCall]]
"""Returns the calls in the text of a turn, in order."""


def parse_hermes(text: str) -> list[ParsedCall]:
    """Calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen chat
    templates."""
    return [_hermes_call(body) for body in _bodies(text, "tool_call")]


def _bodies(text: str, tag: str) -> Iterator[str]:
    """The text between each ``<tag>`` and the next ``</tag>``. One pass: a regular expression searches the
    whole text behind each opening without an end."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = 0
    while (start := text.find(opening, end)) >= 0:
        start += len(opening)
        if (end := text.find(closing, start)) < 0:
            return
        yield text[start:end]


def _hermes_call(body: str) -> ParsedCall:
    try:
        call = json.loads(body)
    # Deeply nested JSON of a policy raises RecursionError.
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
    """The parser of calls ``<tool>text</tool>`` to a single tool with one argument, the text: a short format
    for small models."""
    (argument,) = tool.parameters
    return lambda text: [ToolCall(tool.name, {argument: body}) for body in _bodies(text, "tool")]


def choose_parser(config: MultiTurnConfig, tools: Mapping[str, Tool]) -> Parser:
    """The parser of ``multi_turn.format``. Raises ``ValueError`` when the tools do not fit the format."""
    if config.format == "hermes":
        return parse_hermes
    available = list(tools.values())
    if len(available) != 1 or len(available[0].parameters) != 1:
        raise ValueError(
            "actor_rollout_ref.rollout.multi_turn.format=tag needs one tool with one argument in "
            f"multi_turn.tools, got {[tool.name for tool in available]}; pass format=hermes."
        )
    return tag_parser(available[0])


def answer_call(call: ParsedCall, tools: Mapping[str, Tool], timeout_seconds: float) -> str:
    """The answer of a tool, or the error message of a wrong call, for the policy.

    Raises ``ToolFailedError`` when the tool fails or hangs.
    """
    if isinstance(call, str):
        return f"error: {call}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: the tools are {json.dumps(sorted(tools))}"
    return call_tool(tool, call.arguments, timeout_seconds)


def truncate_text(text: str, limit: int, side: str) -> str:
    """``text`` cut to ``limit`` characters at its left or right ``side`` or in the ``middle``, with a
    mark."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + "...(truncated)"
    tail = limit // 2
    return text[: limit - tail] + "...(truncated)..." + text[len(text) - tail :]


_MAX_CONCURRENT_TURNS = 64
"""Number of turns of a process whose tools run concurrently; further turns wait."""


class Toolbox:
    """The tools of a run and the threads that call them, shared by all episodes of a process."""

    def __init__(self, config: MultiTurnConfig) -> None:
        """Raises ``ValueError`` when a tool is unknown, or tools and format do not fit together."""
        self.config = config
        self._tools = find_tools(config.tools)
        self._parse: Parser = choose_parser(config, self._tools)
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT_TURNS, "tools")

    def parse_calls(self, text: str) -> list[ParsedCall]:
        """The calls in the text of a turn, up to ``max_parallel_calls``."""
        return self._parse(text)[: self.config.max_parallel_calls]

    async def answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """The answer to each call. Raises ``ToolFailedError`` when a tool fails or hangs."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._answer, calls)

    def _answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """Call the tools one after the other."""
        limit, side = self.config.max_tool_response_length, self.config.tool_response_truncate_side
        seconds = self.config.tool_timeout_seconds
        return [truncate_text(answer_call(call, self._tools, seconds), limit, side) for call in calls]


class ToolEnvironment(Environment):
    """Answers the tool calls of a turn; the episode is done when a turn calls no tool.

    It is truncated when a turn calls a tool at ``max_assistant_turns`` or ``max_user_turns``.
    """

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Use the row's prompt; the arguments of the chat template have the tools' descriptions."""

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. Raises ``ToolFailedError`` when a tool fails or hangs."""
        calls = self._toolbox.parse_calls(turn.text) if turn.stopped else []
        config = self._toolbox.config
        if not calls:
            return Reply(done=True)
        if turn.number + 1 == config.max_assistant_turns or turn.number == config.max_user_turns:
            return Reply(truncated=True)
        answers = await self._toolbox.answer(calls)
        messages = [{"role": "tool", "content": text} for text in answers]
        return Reply(messages, metrics={TOOL_CALLS: float(len(answers))})

    def reply_roles(self) -> list[list[str]]:
        """See ``Environment``."""
        return tool_roles(self._toolbox.config)

    async def state(self) -> bytes:
        """Empty: tools have no state between calls."""
        return b""

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``state``."""


def tool_roles(config: MultiTurnConfig) -> list[list[str]]:
    """The ``reply_roles`` of tools: one answer, and more in one reply where a turn may have several calls."""
    return [["tool"] * calls for calls in range(1, min(config.max_parallel_calls, 2) + 1)]


def template_arguments(config: MultiTurnConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template: ``arguments`` and, with ``format=hermes``, descriptions of the tools.

    Raises ``ValueError`` when a tool is unknown.
    """
    if config.format != "hermes" or not config.enable:
        return dict(arguments)
    return {"tools": [tool.schema() for tool in find_tools(config.tools).values()], **arguments}
