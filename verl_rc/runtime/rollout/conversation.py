"""Conversations of a policy with its environment: text of turns goes out, replies come back as tokens.

Every sample takes its turns at its own pace. Sampled token ids are never encoded again from text.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl_rc.records.episode import Episode, EpisodeKey, Exchange, Message, Opening, Reply, Turn
from verl_rc.records.parts import Answer, Part, Sample, num_tokens, runs, token_ids
from verl_rc.records.stop_tokens import stop_token_ids
from verl_rc.records.tokenize import ContinuationEncoder, encode_opening, load_tokenizer
from verl_rc.runtime.distributed.event_loop import EventLoop
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import (
    Failure,
    Host,
    Hosts,
    NeedsHistory,
    StepOutcome,
    StepResult,
    open_host,
)
from verl_rc.runtime.rollout.sampling import ConversationOptions, GenerationRequest
from verl_rc.runtime.rollout.tool_environment import template_arguments

MAX_ATTEMPTS = 2
"""Requests to an environment for one opening or reply before its sample fails."""

_HOST_TIMEOUT_FACTOR = 10.0
"""Time limit of a host over that of an environment's method: a host may have to replay turns."""


class LocalHosts(Hosts):
    """One host, in a thread of this process."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = EventLoop("environments")

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Hosts``."""
        return await asyncio.wrap_future(self._loop.start(self._host.open(row, seed)))

    async def step(self, episode: Episode, turn: Turn) -> StepOutcome:
        """See ``Hosts``."""
        return await asyncio.wrap_future(self._loop.start(self._host.step(episode, turn)))

    async def close(self, key: EpisodeKey) -> None:
        """See ``Hosts``."""
        await asyncio.wrap_future(self._loop.start(self._host.close(key)))


@dataclass(frozen=True)
class AnsweredSample:
    """A sample with the environment's reply to its last turn."""

    sample: Sample
    continues: bool
    """Whether the policy gets another turn."""


class Conversations:
    """Sends turns to the environment and appends its replies to samples.

    When a turn ends with a stop token, the messages of the reply follow, rendered by the chat template, and
    then another turn. The prompt of the next turn is the prompt of the last one, its sampled tokens and the
    tokens of the reply; if the reply begins another conversation, it is the tokens of the reply alone.
    Sampled tokens and tokens of replies share the limit ``max_tokens``.

    A sample ends when the reply is done. It is cut off (``finished`` False) when a turn reaches the limit,
    when the reply is truncated, after ``max_turns``, or when the reply would leave no room for another token;
    such a reply is left out. In the last two cases a complete turn has come before: the environment then gets
    one more turn, without tokens and not ``stopped``, and its reply is joined to the last one.
    """

    def __init__(
        self,
        tokenizer: Any,
        hosts: Hosts,
        template_arguments: Mapping[str, Any],
        max_turns: int | None = None,
        host_timeout_seconds: float | None = None,
        stop_token_ids: Sequence[int] = (),
        allow_special_tokens: bool = False,
    ) -> None:
        """``host_timeout_seconds``: limit of a host's answer, for hosts that an environment blocks.
        ``stop_token_ids``: tokens that end a turn, besides EOS."""
        self._tokenizer = tokenizer
        self._hosts = hosts
        self._template_arguments = template_arguments
        self._encoder = ContinuationEncoder(
            tokenizer, template_arguments, stop_token_ids, allow_special_tokens
        )
        self._allow_special_tokens = allow_special_tokens
        self._max_turns = max_turns
        self._host_timeout = host_timeout_seconds
        self._loop = EventLoop("conversations")

    @classmethod
    def from_options(cls, options: ConversationOptions) -> "Conversations":
        """Build them with the tokenizer of ``options``. Raises ``ValueError`` when tools or environment
        cannot be made."""
        environment = options.rollout.environment
        timeout = None if environment.name is None else _HOST_TIMEOUT_FACTOR * environment.step_seconds
        tokenizer = load_tokenizer(options.tokenizer_path, options.trust_remote_code)
        return cls(
            tokenizer,
            options.hosts or LocalHosts(open_host(options.rollout)),
            template_arguments(options.rollout.multi_turn, options.chat_template_kwargs),
            environment.max_turns,
            timeout,
            stop_token_ids(tokenizer, options.tokenizer_path),
            options.rollout.allow_special_tokens,
        )

    def request_reply(
        self, request: GenerationRequest, sample: Sample, max_tokens: int
    ) -> "Future[AnsweredSample]":
        """The sample with the environment's reply to its last turn.

        The future raises ``EpisodeFailedError`` when the environment gives no reply, or the chat template
        cannot continue with it.
        """
        return self._loop.start(self._reply(request, sample, max_tokens))

    async def _reply(self, request: GenerationRequest, sample: Sample, max_tokens: int) -> AnsweredSample:
        assert request.episode is not None
        start = time.perf_counter()
        *earlier_turns, turn = self._turns(sample)
        history = [
            Exchange(earlier, reply) for earlier, reply in zip(earlier_turns, sample.replies, strict=True)
        ]
        result = await self._step_with_retries(replace(request.episode, state=sample.state), history, turn)
        reply = result.reply
        parts = self._parts_of_next_turn(request.episode, sample, turn, reply, max_tokens)
        if parts is None and turn.stopped and not reply.ends:
            history.append(Exchange(turn, reply))
            last_turn = Turn(turn.number + 1, "", (), stopped=False)
            episode = replace(request.episode, state=result.state)
            reply = reply.joined((await self._step_with_retries(episode, history, last_turn)).reply)
        replies = [*sample.replies, replace(reply, waited=time.perf_counter() - start)]
        if parts is None:
            finished = turn.stopped and reply.done and not reply.truncated
            sample = replace(sample, replies=replies, state=None, finished=finished)
            return AnsweredSample(sample, continues=False)
        sample = replace(sample, parts=parts, replies=replies, state=result.state, finished=False)
        return AnsweredSample(sample, continues=True)

    def _parts_of_next_turn(
        self, episode: Episode, sample: Sample, turn: Turn, reply: Reply, max_tokens: int
    ) -> list[Part | Answer] | None:
        """The response with the tokens of the reply. None if no turn follows."""
        if reply.ends or not turn.stopped or turn.number + 1 == self._max_turns:
            return None
        opening = reply.opening
        try:
            tokens = (
                self._encoder_behind(episode, sample.replies).encode(reply.messages)
                if opening is None
                else encode_opening(
                    self._tokenizer, opening, self._template_arguments, self._allow_special_tokens
                )
            )
        except ValueError as error:
            raise EpisodeFailedError(f"the environment's reply to turn {turn.number}: {error}") from error
        answer = Answer(torch.tensor(tokens, dtype=torch.int32), restarts=opening is not None)
        parts = [*sample.parts, answer]
        # An engine samples at least one token after the reply.
        return parts if num_tokens(parts) < max_tokens else None

    def _encoder_behind(self, episode: Episode, replies: Sequence[Reply]) -> ContinuationEncoder:
        """The encoder of a reply behind the conversation so far."""
        opening = episode.opening
        messages: list[Sequence[Message]] = []
        for reply in replies:
            if reply.opening is not None:
                opening, messages = reply.opening, []
            else:
                messages.append(reply.messages)
        if opening is None:
            return self._encoder.behind(episode.row.get("prompt", ()), messages)
        return self._encoder.behind(opening.messages, messages, opening.tools)

    async def _step_with_retries(
        self, episode: Episode, history: Sequence[Exchange], turn: Turn
    ) -> StepResult:
        """The environment's result of a turn, in ``MAX_ATTEMPTS`` attempts. Raises ``EpisodeFailedError``."""
        for attempt in range(MAX_ATTEMPTS):
            outcome = await self._step(episode, turn)
            episode = replace(episode, history=history)
            if isinstance(outcome, NeedsHistory):
                outcome = await self._step(episode, turn)
            if isinstance(outcome, StepResult):
                return replace(outcome, reply=replace(outcome.reply, asked_again=attempt))
            assert isinstance(outcome, Failure)
            failure = outcome
            if not failure.may_retry:
                break
        raise EpisodeFailedError(failure.reason)

    async def _step(self, episode: Episode, turn: Turn) -> StepOutcome:
        try:
            return await asyncio.wait_for(self._hosts.step(episode, turn), self._host_timeout)
        except asyncio.TimeoutError:
            return Failure(
                f"turn {turn.number} of episode {episode.key}: an environment must leave its thread to "
                "others while it waits (await), but its host did not answer within "
                f"{self._host_timeout:g} s.",
                may_retry=False,
            )

    def _turns(self, sample: Sample) -> list[Turn]:
        """The policy's turns so far."""
        turns = [parts for is_turn, parts in runs(sample.parts) if is_turn]
        return [
            self._turn(number, token_ids(parts), stopped=number + 1 < len(turns) or sample.finished)
            for number, parts in enumerate(turns)
        ]

    def _turn(self, number: int, tokens: list[int], *, stopped: bool) -> Turn:
        # Whichever stop token has ended the turn is its last one.
        written = tokens[:-1] if stopped else tokens
        # In many chat templates the tags of a tool call are special tokens.
        text: str = self._tokenizer.decode(written, skip_special_tokens=False)
        return Turn(number, text, tuple(tokens), stopped)

    def close(self, request: GenerationRequest) -> None:
        """Close the episode of a cancelled request."""
        assert request.episode is not None
        self._loop.start(self._hosts.close(request.episode.key))
