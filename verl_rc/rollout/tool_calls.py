"""How a policy writes tool calls, and how their answers come back to it."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.rollout.tools import Tool, ToolCaller

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TAG = re.compile(r"<tool>(.*?)</tool>", re.DOTALL)


@dataclass(frozen=True)
class ToolCall:
    """One call that a turn asks for."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class MalformedCall:
    """Something marked as a call that is none."""

    reason: str
    """What is wrong, for the policy."""


ParsedCall = ToolCall | MalformedCall
Parser = Callable[[str], list[ParsedCall]]
"""Parses the text of a turn into its calls, in order."""


def parse_hermes(text: str) -> list[ParsedCall]:
    """Calls ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, the format of Hermes and Qwen chat templates."""
    return [_hermes_call(body) for body in _HERMES.findall(text)]


def _hermes_call(body: str) -> ParsedCall:
    try:
        call = json.loads(body)
    # A policy writes anything: deeply nested JSON ends in a RecursionError.
    except (ValueError, RecursionError):
        return MalformedCall("a tool call must be JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(call.get("arguments"), dict):
        return MalformedCall("a tool call must be an object with a name and arguments")
    return ToolCall(call["name"], call["arguments"])


def tag_parser(tool: Tool) -> Parser:
    """Calls ``<tool>text</tool>`` of the one tool there is, whose one argument is the text: short, for small models."""
    (argument,) = tool.parameters
    return lambda text: [ToolCall(tool.name, {argument: body}) for body in _TAG.findall(text)]


def choose_parser(config: MultiTurnConfig, tools: Mapping[str, Tool]) -> Parser:
    """The parser of ``multi_turn.format``. Raises ``ValueError`` when the tools do not fit the format."""
    if config.format == "hermes":
        return parse_hermes
    chosen = list(tools.values())
    if len(chosen) != 1 or len(chosen[0].parameters) != 1:
        raise ValueError(
            "actor_rollout_ref.rollout.multi_turn.format=tag needs one tool with one argument in multi_turn.tools, got "
            f"{[tool.name for tool in chosen]}; pass format=hermes."
        )
    return tag_parser(chosen[0])


def answer_call(call: ParsedCall, tools: Mapping[str, Tool], caller: ToolCaller) -> str:
    """What the policy reads after a call: the tool's answer, or what is wrong with the call.

    Raises ``ToolFailedError`` when the tool itself fails, or hangs.
    """
    if isinstance(call, MalformedCall):
        return f"error: {call.reason}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: the tools are {json.dumps(sorted(tools))}"
    return caller.call(tool, call.arguments)


def truncated(text: str, limit: int, side: str) -> str:
    """``text`` cut to ``limit`` characters and marked where it is cut: on its left or right ``side``, or in the ``middle``."""
    if len(text) <= limit:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - limit :]
    if side == "right":
        return text[:limit] + "...(truncated)"
    tail = limit // 2
    return text[: limit - tail] + "...(truncated)..." + text[len(text) - tail :]
