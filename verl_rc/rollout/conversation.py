"""Conversations with tools, in the engine's process: how a policy writes calls, and how answers come back to
it.

Every sample takes its turns at its own pace. Sampled token ids are never encoded again from text.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.parts import Answer, Part, Sample, last_turn, num_tokens, token_ids, tool_turns
from verl_rc.data.tokenize import ToolTurnEncoder, load_tokenizer
from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.sampling import ConversationOptions
from verl_rc.rollout.tools import Tool, ToolCaller, ToolFailedError, find_tools

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


def answer_call(call: ParsedCall, tools: Mapping[str, Tool], caller: ToolCaller) -> str:
    """What the policy reads after a call: the tool's answer, or what is wrong with the call.

    Raises ``ToolFailedError`` when the tool itself fails, or hangs.
    """
    if isinstance(call, str):
        return f"error: {call}"
    tool = tools.get(call.name)
    if tool is None:
        return f"error: the tools are {json.dumps(sorted(tools))}"
    return caller.call(tool, call.arguments)


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
"""Turns of one engine whose tools work at the same time; further ones wait."""


class Conversations:
    """Answers the tool calls of a turn; says whether another turn follows.

    A turn that ends with the end token and holds a tool call is followed by the tools' answers, rendered by
    the chat template, and by another turn. The prompt of that turn is the token ids of the one before, those
    sampled, and those of the answers. Sampled and tool tokens share the limit ``max_tokens``. A conversation
    ends when a turn calls no tool. It is cut off (``finished`` False) when a turn reaches the limit, when the
    answers would leave no room for another token (they are then left out), or when a call is left at
    ``max_assistant_turns`` or ``max_user_turns``.
    """

    def __init__(
        self, tokenizer: Any, config: MultiTurnConfig, template_arguments: Mapping[str, Any]
    ) -> None:
        """Raises ``ValueError`` when a tool is unknown, or tools, format or chat template do not fit
        together."""
        self._tokenizer = tokenizer
        self._config = config
        self._tools = find_tools(config.tools)
        self._parse: Parser = choose_parser(config, self._tools)
        self._encoder = ToolTurnEncoder(tokenizer, template_arguments)
        self._pool = ThreadPoolExecutor(_TURNS_AT_ONCE, "conversation")
        self._callers = threading.local()

    @classmethod
    def open(cls, options: ConversationOptions) -> "Conversations":
        """Build it with the tokenizer of ``options``. Raises like ``Conversations``."""
        tokenizer = load_tokenizer(options.tokenizer_path, options.trust_remote_code)
        return cls(
            tokenizer, options.config, template_arguments(options.config, options.chat_template_kwargs)
        )

    def after_turn(self, sample: Sample) -> "Future[list[str]] | Sample":
        """The answers to the calls of a turn that has ended, one text for each; or the sample, where the
        conversation has ended.

        The future raises ``ToolFailedError`` when a tool fails or hangs.
        """
        calls, turns = self._calls(sample), tool_turns(sample.parts)
        if not calls:
            return sample
        if turns + 1 == self._config.max_assistant_turns or turns == self._config.max_user_turns:
            return replace(sample, finished=False)
        return self._pool.submit(self._answer, calls)

    def with_answers(self, sample: Sample, answers: Sequence[str], max_tokens: int) -> tuple[Sample, bool]:
        """The sample with the answers, and whether another turn follows; it has ended when they leave no room
        for one."""
        sample = replace(sample, finished=False, tool_calls=sample.tool_calls + len(answers))
        answer = Answer(torch.tensor(self._encoder.encode(answers), dtype=torch.int32))
        parts = [*sample.parts, answer]
        # At least one token must fit after the answers: no engine can go on without room for one.
        if num_tokens(parts) >= max_tokens:
            return sample, False
        return replace(sample, parts=parts), True

    def _calls(self, sample: Sample) -> list[ParsedCall]:
        """The calls of the last turn that are to be answered."""
        if not sample.finished:
            return []
        # In many chat templates the tags of a tool call are special tokens.
        text = self._tokenizer.decode(token_ids(last_turn(sample.parts)), skip_special_tokens=False)
        return self._parse(text)[: self._config.max_parallel_calls]

    def _answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """Answer calls in a thread of the pool. Each has a caller of its own, which calls one tool at a
        time."""
        if not hasattr(self._callers, "own"):
            self._callers.own = ToolCaller(self._config.tool_timeout_seconds)
        limit, side = self._config.max_tool_response_length, self._config.tool_response_truncate_side
        try:
            return [
                truncated(answer_call(call, self._tools, self._callers.own), limit, side) for call in calls
            ]
        except ToolFailedError:
            self._callers.own.close()
            del self._callers.own  # the next turn in this thread gets another one
            raise


def template_arguments(config: MultiTurnConfig, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template for every prompt: ``arguments``, and with ``format=hermes`` the
    descriptions of the tools.

    Raises ``ValueError`` when a tool is unknown.
    """
    if config.format != "hermes":
        return dict(arguments)
    return {"tools": [tool.schema() for tool in find_tools(config.tools).values()], **arguments}


class OpenSamples:
    """The book of a sampler, by the step loop's keys: what was submitted, and what there is of it."""

    def __init__(self, conversations: Conversations | None) -> None:
        """``conversations`` answers tool calls; None: samples call no tools."""
        self._conversations = conversations
        self._open: dict[int, tuple[QueuedSample, Sample]] = {}

    def begin(self, key: int, queued: QueuedSample) -> "tuple[Sample, Future[list[str]] | None]":
        """What there is of a sample that begins or goes on, and the answers of tools that it waits for, if
        there are any."""
        if key in self._open:
            return self[key], None
        request = queued.request
        sample = Sample(queued.number, request.parts, tool_calls=request.tool_calls)
        self._open[key] = queued, sample
        if self._conversations is None or not _ends_with(sample, queued.options.stop_token_ids):
            return sample, None
        # The engine that sampled it was lost while its tools were at work.
        self._open[key] = queued, replace(sample, finished=True)
        answers = self._conversations.after_turn(self[key])
        return self[key], None if isinstance(answers, Sample) else answers

    def __getitem__(self, key: int) -> Sample:
        """What there is of a sample that has begun."""
        return self._open[key][1]

    def get(self, key: int) -> Sample | None:
        """Return the same; None: it has not begun."""
        return self[key] if key in self._open else None

    def grown(self, key: int, parts: Sequence[Part]) -> Sample:
        """A sample that has begun, with what was sampled since."""
        return replace(self[key], parts=[*self[key].parts, *parts])

    def grow(self, key: int, parts: Sequence[Part]) -> None:
        """Keep what was sampled."""
        self._open[key] = self._open[key][0], self.grown(key, parts)

    def drop(self, key: int) -> None:
        """Forget a sample, if it has begun."""
        self._open.pop(key, None)

    def end_turn(self, key: int, parts: Sequence[Part], stopped: bool) -> "Sample | Future[list[str]]":
        """The sample if it has ended with this turn, else the answers of tools that it waits for.

        ``stopped``: a stop token has ended the turn (False: a limit).
        """
        queued, sample = self._open[key][0], replace(self.grown(key, parts), finished=stopped)
        self._open[key] = queued, sample
        outcome = sample if self._conversations is None else self._conversations.after_turn(sample)
        if isinstance(outcome, Sample):
            self.drop(key)
        return outcome

    def proceed(self, key: int, answers: Sequence[str]) -> Sample | None:
        """Take the tools' answers; returns the sample if they have ended it."""
        assert self._conversations is not None
        queued, sample = self._open[key]
        limit = queued.request.limit(queued.options)
        sample, goes_on = self._conversations.with_answers(sample, answers, limit)
        self._open[key] = queued, sample
        return None if goes_on else self._open.pop(key)[1]


def _ends_with(sample: Sample, stop_token_ids: Sequence[int]) -> bool:
    """Whether the policy's last token is one of these."""
    turn = last_turn(sample.parts)
    return bool(turn) and int(turn[-1].token_ids[-1]) in stop_token_ids
