"""Conversations with tools, in the engine's process: every sample takes its turns at its own pace.

Sampled token ids are never encoded again from text.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.tokenize import ToolTurnEncoder, load_tokenizer
from verl_rc.rollout.response import Response
from verl_rc.rollout.sampling import ConversationOptions
from verl_rc.rollout.tool_calls import ParsedCall, Parser, answer_call, choose_parser, truncated
from verl_rc.rollout.tools import ToolCaller, ToolFailedError, find_tools

_TURNS_AT_ONCE = 64
"""Turns of one engine whose tools work at the same time; further ones wait."""


class Conversations:
    """Answers the tool calls of a turn; says whether another turn follows.

    A turn that ends with the end token and holds a tool call is followed by the tools' answers, rendered by the chat template,
    and by another turn. The prompt of that turn is the token ids of the one before, those sampled, and those of the answers.
    Sampled and tool tokens share the limit ``max_tokens``. A conversation ends when a turn calls no tool. It is cut off
    (``stopped`` False) when a turn reaches the limit, when the answers would leave no room for another token (they are then
    left out), or when a call is left at ``max_assistant_turns`` or ``max_user_turns``.
    """

    def __init__(self, tokenizer: Any, config: MultiTurnConfig, template_arguments: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` when a tool is unknown, or tools, format or chat template do not fit together."""
        self._tokenizer = tokenizer
        self._config = config
        self._tools = find_tools(config.tools)
        self._parse: Parser = choose_parser(config, self._tools)
        self._encoder = ToolTurnEncoder(tokenizer, template_arguments)
        self._pool = ThreadPoolExecutor(_TURNS_AT_ONCE, "conversation")
        self._callers = threading.local()

    @classmethod
    def open(cls, options: ConversationOptions) -> "Conversations":
        """With the tokenizer of ``options``. Raises like ``Conversations``."""
        tokenizer = load_tokenizer(options.tokenizer_path, options.trust_remote_code)
        return cls(tokenizer, options.config, template_arguments(options.config, options.chat_template_kwargs))

    def after_turn(self, response: Response) -> "Future[list[str]] | None":
        """The answers to the calls of a turn that has ended, one text for each; None: the conversation has ended.

        The future raises ``ToolFailedError`` when a tool fails or hangs.
        """
        calls = self._calls(response)
        if not calls:
            return None
        if response.tool_turns + 1 == self._config.max_assistant_turns or response.tool_turns == self._config.max_user_turns:
            response.stopped = False
            return None
        return self._pool.submit(self._answer, calls)

    def with_answers(self, response: Response, answers: Sequence[str], max_tokens: int) -> tuple[Response, bool]:
        """The response with the answers, and whether another turn follows; it has ended when they leave no room for one."""
        response = replace(response, stopped=False, tool_calls=response.tool_calls + len(answers))
        token_ids = self._encoder.encode(answers)
        # At least one token must fit after the answers: vLLM refuses a request without room for any.
        if len(response.token_ids) + len(token_ids) >= max_tokens:
            return response, False
        return response.with_answer(token_ids), True

    def _calls(self, response: Response) -> list[ParsedCall]:
        """The calls of the last turn that are to be answered."""
        if not response.stopped:
            return []
        # In many chat templates the tags of a tool call are special tokens.
        text = self._tokenizer.decode(response.token_ids[response.turn_start :], skip_special_tokens=False)
        return self._parse(text)[: self._config.max_parallel_calls]

    def _answer(self, calls: Sequence[ParsedCall]) -> list[str]:
        """In a thread of the pool. Each has a caller of its own, which calls one tool at a time."""
        if not hasattr(self._callers, "own"):
            self._callers.own = ToolCaller(self._config.tool_timeout_seconds)
        limit, side = self._config.max_tool_response_length, self._config.tool_response_truncate_side
        try:
            return [truncated(answer_call(call, self._tools, self._callers.own), limit, side) for call in calls]
        except ToolFailedError:
            self._callers.own.close()
            del self._callers.own  # the next turn in this thread gets another one
            raise


def template_arguments(config: MultiTurnConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template for every prompt: those given, and with ``format=hermes`` the descriptions of the tools.

    Raises ``ValueError`` when a tool is unknown.
    """
    if config.format != "hermes":
        return dict(given)
    return {"tools": [tool.schema() for tool in find_tools(config.tools).values()], **given}
