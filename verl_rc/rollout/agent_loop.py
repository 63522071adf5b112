"""Conversations with tools: all active ones take a turn together; sampled token ids are never re-encoded from text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.data.batches import Completions, Timed, unpadded
from verl_rc.data.tokenize import ToolTurnEncoder
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.rollout.tool_calls import Parser, answer_call, choose_parser, truncated
from verl_rc.rollout.tools import ToolCaller, find_tools

SampleTurn = Callable[[Sequence[GenerationRequest], SamplingOptions], Timed[Completions]]
"""Samples one turn on all engines of a run: one completion per request, in order."""


@dataclass
class _Conversation:
    """One sample while it grows. Lists run over the tokens after the prompt."""

    request: GenerationRequest
    token_ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    assistant_turns: int = 0
    tool_turns: int = 0
    tool_calls: int = 0
    finished: bool = False

    def next_request(self, max_tokens: int) -> GenerationRequest:
        """The next turn: everything so far is its prompt, and each turn has a seed of its own."""
        seed, turn = self.request.seed, self.assistant_turns
        return GenerationRequest(
            # Token ids as sampled: text that is tokenised again may give other ids, and the log-probs recorded
            # at sampling would belong to tokens that are not in the batch.
            self.request.prompt_token_ids + self.token_ids,
            # The first turn keeps the seed: a conversation without tools is sampled as without the agent loop.
            seed if turn == 0 else request_seed({"sample": seed, "turn": turn}),
            max_tokens - len(self.token_ids),
        )

    def append_turn(self, token_ids: list[int], log_probs: list[float], versions: list[int], finished: bool) -> None:
        """Append what the policy sampled."""
        self.token_ids += token_ids
        self.log_probs += log_probs
        self.versions += versions
        self.sampled += [True] * len(token_ids)
        self.assistant_turns += 1
        self.finished = finished

    def append_tool_response(self, token_ids: list[int]) -> None:
        """Append a tool's answer. The policy did not sample it, so it has neither log-prob nor weight version."""
        self.token_ids += token_ids
        # Any finite number would do: response_mask leaves these positions out of every sum.
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)
        self.sampled += [False] * len(token_ids)
        self.tool_turns += 1


class AgentLoop:
    """Samples like the engines, but lets the policy call tools and read their answers between its turns.

    A turn that ends with the end token and holds a tool call is followed by the tools' answers, rendered by the chat template,
    and by another turn. The prompt of that turn is the token ids of the one before, those sampled, and those of the answers.
    Sampled and tool tokens share the limit ``max_tokens``. A conversation ends when a turn calls no tool. It is cut off
    (``finished`` False) when a turn reaches the limit, when the answers would leave no room for another token (they are then
    left out), or when a call is left at ``max_assistant_turns`` or ``max_user_turns``.
    """

    def __init__(self, tokenizer: Any, config: MultiTurnConfig, template_arguments: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` when a tool is unknown, or tools, format or chat template do not fit together."""
        self._tokenizer = tokenizer
        self._config = config
        self._tools = find_tools(config.tools)
        self._caller = ToolCaller(config.tool_timeout_seconds)
        self._parse: Parser = choose_parser(config, self._tools)
        self._encoder = ToolTurnEncoder(tokenizer, template_arguments)

    def generate(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions, sample_turn: SampleTurn
    ) -> Timed[Completions]:
        """One conversation per request, in order; ``response_mask`` of the result is False at the tools' tokens.

        All active conversations share one call of the engines per turn; the seconds of all turns are summed up.

        Raises ``ToolFailedError`` when a tool fails or hangs.
        """
        busy_seconds = 0.0
        conversations = [_Conversation(request) for request in requests]
        active, width = conversations, options.max_tokens
        while active:
            sampled = sample_turn([c.next_request(options.max_tokens) for c in active], options)
            turn, busy_seconds = sampled.result, busy_seconds + sampled.busy_seconds
            # Engines pad every turn to the run's response width.
            width = turn.responses.shape[1]
            _append_turns(turn, active)
            active = self._after_turn(turn, active, options.max_tokens)
        return Timed(_to_completions(conversations, width), busy_seconds)

    def _after_turn(self, turn: Completions, conversations: list[_Conversation], max_tokens: int) -> list[_Conversation]:
        """Answer the calls of a turn; returns the conversations that are still active."""
        rows = unpadded(turn.responses, turn.response_lengths)
        # In many chat templates the tags of a tool call are special tokens.
        texts = self._tokenizer.batch_decode(rows, skip_special_tokens=False)
        pairs = zip(texts, conversations, strict=True)
        return [conversation for text, conversation in pairs if self._answer_calls(text, conversation, max_tokens)]

    def _answer_calls(self, text: str, conversation: _Conversation, max_tokens: int) -> bool:
        """Append the answers to the calls in ``text``; returns whether the policy has another turn."""
        calls = self._parse(text)[: self._config.max_parallel_calls] if conversation.finished else []
        if not calls:
            return False
        conversation.finished = False
        if conversation.assistant_turns == self._config.max_assistant_turns:
            return False
        if conversation.tool_turns == self._config.max_user_turns:
            return False
        limit, side = self._config.max_tool_response_length, self._config.tool_response_truncate_side
        answers = [answer_call(call, self._tools, self._caller) for call in calls]
        token_ids = self._encoder.encode([truncated(text, limit, side) for text in answers])
        conversation.tool_calls += len(calls)
        # At least one token must fit after the answers: vLLM refuses a request without room for any.
        if len(conversation.token_ids) + len(token_ids) >= max_tokens:
            return False
        conversation.append_tool_response(token_ids)
        return True


def template_arguments(config: MultiTurnConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the chat template for every prompt: those given, and with ``format=hermes`` the descriptions of the tools.

    Raises ``ValueError`` when a tool is unknown.
    """
    if config.format != "hermes":
        return dict(given)
    return {"tools": [tool.schema() for tool in find_tools(config.tools).values()], **given}


def _append_turns(turn: Completions, conversations: list[_Conversation]) -> None:
    rows = unpadded(turn.responses, turn.response_lengths)
    columns = zip(rows, turn.rollout_log_probs.tolist(), turn.policy_versions.tolist(), turn.finished.tolist(), strict=True)
    for conversation, (token_ids, log_probs, versions, finished) in zip(conversations, columns, strict=True):
        count = len(token_ids)
        conversation.append_turn(token_ids, log_probs[:count], versions[:count], finished)


def _to_completions(conversations: list[_Conversation], width: int) -> Completions:
    def grid(column: Callable[[_Conversation], Sequence[float]], padding: float, dtype: torch.dtype) -> torch.Tensor:
        rows = [list(column(c)) for c in conversations]
        return torch.tensor([row + [padding] * (width - len(row)) for row in rows], dtype=dtype)

    return Completions(
        responses=grid(lambda c: c.token_ids, 0, torch.int64),
        response_lengths=torch.tensor([len(c.token_ids) for c in conversations]),
        rollout_log_probs=grid(lambda c: c.log_probs, 0.0, torch.float32),
        policy_versions=grid(lambda c: c.versions, -1, torch.int64),
        finished=torch.tensor([c.finished for c in conversations]),
        response_mask=grid(lambda c: c.sampled, False, torch.bool),
        num_turns=torch.tensor([1 + c.assistant_turns + c.tool_turns for c in conversations]),
        tool_calls=torch.tensor([c.tool_calls for c in conversations]),
        batch_size=[len(conversations)],
    )
