"""OpenAI's chat format: calls and completions."""

import json
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_rc.config.errors import listed, shortened
from verl_rc.printable import printable
from verl_rc.records.episode import Turn
from verl_rc.runtime.rollout.tool_environment import ToolCall, parse_hermes

_PERMITTED: Mapping[str, Sequence[Any]] = {
    "n": (None, 1),
    "stop": (None, "", []),
    "stream": (None, False),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "response_format": (None, {"type": "text"}),
    "tool_choice": (None, "auto"),
    "functions": (None, []),
}
"""Permitted values of options that would change which tokens are sampled, or how they are returned."""
_KNOWN_OPTIONS = {"model", "messages", "tools", "user", *_PERMITTED}
_ROLES = ("system", "user", "assistant", "tool")
_MAX_NAMED = 5
"""Number of options without effect that are warned of."""


class RefusedCallError(Exception):
    """A call without a turn of the policy; the message has the reason."""

    def __init__(self, status: int, reason: str) -> None:
        """``status``: code of the HTTP response."""
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class ChatCall:
    """A conversation whose next turn is the policy's."""

    messages: list[dict[str, Any]]
    """Messages in plain form, see ``plain_message``."""
    tools: list[dict[str, Any]]


def parse_call(body: Any, named: set[str] | None = None) -> ChatCall:
    """The call in the body of a request. Raises ``RefusedCallError`` with the reason.

    Warns of up to five options without effect, but of none that is among those ``named`` before, and adds
    them there.
    """
    if not isinstance(body, Mapping):
        raise RefusedCallError(400, "the body must be a JSON object with messages.")
    for name, permitted in _PERMITTED.items():
        if body.get(name) not in permitted:
            raise RefusedCallError(
                400,
                f"{name} must be left out, got {body[name]!r:.200}: the run decides how tokens are drawn, "
                "and sends one whole answer.",
            )
    messages, tools = body.get("messages"), body.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise RefusedCallError(400, "messages must be a list with at least one message.")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RefusedCallError(400, "tools must be a list of objects {type, function}.")
    options = {str(name) for name, value in body.items() if value is not None}
    _warn_of(options - _KNOWN_OPTIONS, set() if named is None else named)
    return ChatCall([plain_message(message) for message in messages], tools)


def _warn_of(options: set[str], named: set[str]) -> None:
    """Warn once of options without effect, as long as fewer than five are ``named``."""
    unnamed, most = options - named, _MAX_NAMED - len(named)
    if not unnamed or most <= 0:
        return
    names = printable(listed(map(shortened, unnamed), most))
    have = "has" if len(unnamed) == 1 else "have"
    warnings.warn(
        f"{names} of an agent's calls {have} no effect: the run decides how tokens are drawn", stacklevel=3
    )
    named.update(sorted(unnamed)[:most])


def plain_message(message: Any) -> dict[str, Any]:
    """A message with the fields that chat templates read, in one form, so that messages can be compared.

    Raises ``RefusedCallError`` when it is no message, or has other content than text.
    """
    role = message.get("role") if isinstance(message, dict) else None
    role = "system" if role == "developer" else role
    if role not in _ROLES:
        raise RefusedCallError(400, f"the role of a message must be one of {_ROLES}, got {message!r:.200}.")
    content = message.get("content") or ""
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else None
    if not isinstance(content, str):
        raise RefusedCallError(400, f"the content of a message must be text, got {message!r:.200}.")
    plain = {"role": role, "content": content}
    for name in ("name", "tool_call_id"):
        if message.get(name):
            plain[name] = message[name]
    if calls := message.get("tool_calls"):
        calls = calls if isinstance(calls, list) else [calls]
        plain["tool_calls"] = [_plain_tool_call(call) for call in calls]
    return plain


def _plain_tool_call(call: Any) -> dict[str, Any]:
    try:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RefusedCallError(
            400, f"a tool call must be {{id, function: {{name, arguments}}}}, got {call!r:.200}."
        ) from None
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant_message(turn: Turn, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The message of a turn.

    If the call has ``tools``, tool calls in the hermes format move from the text to ``tool_calls``; if one of
    them is malformed, the message stays text.
    """
    calls = parse_hermes(turn.text) if tools else []
    if not calls or not all(isinstance(call, ToolCall) for call in calls):
        return {"role": "assistant", "content": turn.text}
    tool_calls = [
        {
            "id": f"call_{turn.number}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for index, call in enumerate(calls)
        if isinstance(call, ToolCall)
    ]
    text_before = turn.text.partition("<tool_call>")[0].strip()
    return {"role": "assistant", "content": text_before or None, "tool_calls": tool_calls}


def completion(turn: Turn, message: Mapping[str, Any]) -> dict[str, Any]:
    """The response to a call, with the turn's ``message``."""
    reason = "length" if not turn.stopped else "tool_calls" if "tool_calls" in message else "stop"
    return {
        "id": f"turn-{turn.number}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": "policy",
        "choices": [{"index": 0, "message": message, "finish_reason": reason, "logprobs": None}],
    }
