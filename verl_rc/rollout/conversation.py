"""Conversations of a policy with its environment: turns go out, replies come back as tokens.

Every sample takes its turns at its own pace. Sampled token ids are never encoded again from text.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from verl_rc.data.episode import Episode, EpisodeKey, Exchange, Opening, Reply, Turn
from verl_rc.data.parts import Answer, Part, Sample, num_tokens, runs, token_ids
from verl_rc.data.tokenize import ContinuationEncoder, encode_opening, load_tokenizer
from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.environment import EpisodeFailedError
from verl_rc.rollout.environment_host import (
    Failure,
    Host,
    Hosts,
    NeedsHistory,
    StepOutcome,
    StepResult,
    open_host,
)
from verl_rc.rollout.sampling import ConversationOptions, GenerationRequest
from verl_rc.rollout.tool_environment import template_arguments

TRIES = 2
"""How often an environment is asked for an opening or a reply, before its sample fails."""

_PATIENCE = 10.0
"""Limits of a call that a host may take to answer: it may have to replay turns."""


class EventLoop:
    """An event loop in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def start(self, call: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run ``call`` there; returns at once."""
        return asyncio.run_coroutine_threadsafe(call, self._loop)


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
class Advanced:
    """A sample with the environment's reply to its last turn."""

    sample: Sample
    goes_on: bool
    """Whether another turn follows."""


class Conversations:
    """Brings turns to the environment and its replies into samples.

    A turn that ends with a stop token is followed by the messages of the reply, rendered by the chat
    template, and by another turn. The prompt of that turn is the token ids of the one before, those sampled,
    and those of the reply; or those of the reply alone, where that begins another conversation. Sampled
    tokens and those of replies share the limit ``max_tokens``. A sample ends when the reply is done. It is
    cut off (``finished`` False) when a turn reaches the limit, when the reply is truncated or would leave no
    room for another token (it is then left out), or after ``max_turns``. Where one of the last two ends it
    behind a whole turn, the environment gets one more turn, without tokens and not ``stopped``, and the last
    reply is both.
    """

    def __init__(
        self,
        tokenizer: Any,
        hosts: Hosts,
        template_arguments: Mapping[str, Any],
        max_turns: int | None = None,
        patience_seconds: float | None = None,
    ) -> None:
        """``patience_seconds``: for a host that does not answer at all, because an environment blocks it.

        Raises ``ValueError`` when the chat template cannot go on behind an assistant's turn.
        """
        self._tokenizer = tokenizer
        self._hosts = hosts
        self._template_arguments = template_arguments
        self._encoder = ContinuationEncoder(tokenizer, template_arguments)
        self._max_turns = max_turns
        self._patience = patience_seconds
        self._loop = EventLoop("conversations")

    @classmethod
    def open(cls, options: ConversationOptions) -> "Conversations":
        """Build them with the tokenizer of ``options``. Raises ``ValueError`` also when tools or environment
        cannot be made."""
        environment = options.rollout.environment
        patience = None if environment.name is None else _PATIENCE * environment.step_seconds
        return cls(
            load_tokenizer(options.tokenizer_path, options.trust_remote_code),
            options.hosts or LocalHosts(open_host(options.rollout)),
            template_arguments(options.rollout.multi_turn, options.chat_template_kwargs),
            environment.max_turns,
            patience,
        )

    def ask(self, request: GenerationRequest, sample: Sample, max_tokens: int) -> "Future[Advanced]":
        """The sample with the environment's reply to its last turn.

        The future raises ``EpisodeFailedError`` when there is none, or the chat template cannot go on with
        it.
        """
        return self._loop.start(self._ask(request, sample, max_tokens))

    async def _ask(self, request: GenerationRequest, sample: Sample, max_tokens: int) -> Advanced:
        assert request.episode is not None
        began = time.perf_counter()
        *past, turn = self._turns(sample)
        history = [Exchange(one, reply) for one, reply in zip(past, sample.replies, strict=True)]
        answer = await self._answer(replace(request.episode, state=sample.state), history, turn)
        finished = turn.stopped and not answer.reply.truncated
        parts = self._continued(sample, turn, answer.reply, max_tokens)
        if parts is None and turn.stopped and not answer.reply.ends:
            finished = False
            history.append(Exchange(turn, answer.reply))
            none = Turn(turn.number + 1, "", (), stopped=False)
            last = await self._answer(replace(request.episode, state=answer.state), history, none)
            answer = StepResult(answer.reply.joined(last.reply))
        replies = [*sample.replies, replace(answer.reply, waited=time.perf_counter() - began)]
        if parts is None:
            return Advanced(replace(sample, replies=replies, state=None, finished=finished), goes_on=False)
        sample = replace(sample, parts=parts, replies=replies, state=answer.state, finished=False)
        return Advanced(sample, goes_on=True)

    def _continued(
        self, sample: Sample, turn: Turn, reply: Reply, max_tokens: int
    ) -> list[Part | Answer] | None:
        """The response with the messages of the reply; None: no turn follows."""
        if reply.ends or not turn.stopped or turn.number + 1 == self._max_turns:
            return None
        opening = reply.opening
        try:
            tokens = (
                self._encoder.encode(reply.messages)
                if opening is None
                else encode_opening(self._tokenizer, opening, self._template_arguments)
            )
        except ValueError as error:
            raise EpisodeFailedError(f"the environment's reply to turn {turn.number}: {error}") from error
        answer = Answer(torch.tensor(tokens, dtype=torch.int32), restarts=opening is not None)
        parts = [*sample.parts, answer]
        # At least one token must fit after the reply: no engine can go on without room for one.
        return parts if num_tokens(parts) < max_tokens else None

    async def _answer(self, episode: Episode, history: Sequence[Exchange], turn: Turn) -> StepResult:
        """The environment's answer to a turn, for which it is asked ``TRIES`` times."""
        for attempt in range(TRIES):
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
            return await asyncio.wait_for(self._hosts.step(episode, turn), self._patience)
        except asyncio.TimeoutError:
            return Failure(
                f"turn {turn.number} of episode {episode.key}: an environment must leave its thread to "
                f"others while it waits (await), but its host did not answer within {self._patience:g} s.",
                may_retry=False,
            )

    def _turns(self, sample: Sample) -> list[Turn]:
        """The policy's turns so far."""
        turns = [parts for is_turn, parts in runs(sample.parts) if is_turn]
        last = len(turns) - 1
        return [
            self._turn(number, token_ids(parts), stopped=number < last or sample.finished)
            for number, parts in enumerate(turns)
        ]

    def _turn(self, number: int, tokens: list[int], *, stopped: bool) -> Turn:
        # In many chat templates the tags of a tool call are special tokens.
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return Turn(number, text.removesuffix(self._tokenizer.eos_token), tuple(tokens), stopped)

    def close(self, request: GenerationRequest) -> None:
        """Forget the episode of a request that is given up."""
        assert request.episode is not None
        self._loop.start(self._hosts.close(request.episode.key))


class OpenSamples:
    """The book of a sampler, by the step loop's keys: what was submitted, and what there is of it."""

    def __init__(self, conversations: Conversations | None) -> None:
        """``conversations`` has the environment of requests with an episode; None: there are none.

        The sample of any other request ends with its first turn.
        """
        self._conversations = conversations
        self._open: dict[int, tuple[QueuedSample, Sample]] = {}

    def begin(self, key: int, queued: QueuedSample) -> "tuple[Sample, Future[Advanced] | None]":
        """What there is of a sample that begins or goes on, and what it waits for, if it waits for a
        reply."""
        if key in self._open:
            return self[key], None
        request = queued.request
        sample = replace(request.so_far, number=queued.number, finished=False)
        stopped = _ends_with(sample, queued.options.stop_token_ids)
        limit = request.limit(queued.options)
        is_full = num_tokens(sample.parts) >= limit
        if self._conversations is None or request.episode is None or not (stopped or is_full):
            self._open[key] = queued, sample
            return sample, None
        # The engine that sampled it, or the run, was lost while its environment was at work.
        sample = replace(sample, finished=stopped)
        self._open[key] = queued, sample
        return sample, self._conversations.ask(request, sample, limit)

    def __getitem__(self, key: int) -> Sample:
        """What there is of a sample that has begun."""
        return self._open[key][1]

    def get(self, key: int) -> Sample | None:
        """What there is of a sample; None: it has not begun."""
        return self[key] if key in self._open else None

    def grown(self, key: int, parts: Sequence[Part]) -> Sample:
        """A sample that has begun, with what was sampled since."""
        return replace(self[key], parts=[*self[key].parts, *parts])

    def grow(self, key: int, parts: Sequence[Part]) -> None:
        """Keep what was sampled."""
        self._open[key] = self._open[key][0], self.grown(key, parts)

    def drop(self, key: int) -> None:
        """Forget a sample, if it has begun."""
        if key in self._open:
            queued, _ = self._open.pop(key)
            if self._conversations is not None and queued.request.episode is not None:
                self._conversations.close(queued.request)

    def end_turn(self, key: int, parts: Sequence[Part], stopped: bool) -> "Sample | Future[Advanced]":
        """The sample if it has ended with this turn, else what it waits for.

        ``stopped``: a stop token has ended the turn (False: a limit).
        """
        queued, sample = self._open[key][0], replace(self.grown(key, parts), finished=stopped)
        if self._conversations is None or queued.request.episode is None:
            del self._open[key]
            return sample
        self._open[key] = queued, sample
        return self._conversations.ask(queued.request, sample, queued.request.limit(queued.options))

    def proceed(self, key: int, advanced: Advanced) -> Sample | None:
        """Take the sample with the reply that it has waited for; returns it if that has ended it."""
        queued, _ = self._open.pop(key)
        if not advanced.goes_on:
            return advanced.sample
        self._open[key] = queued, advanced.sample
        return None


def _ends_with(sample: Sample, stop_token_ids: Sequence[int]) -> bool:
    """Whether the last token is the policy's, and one of these."""
    last = sample.parts[-1] if sample.parts else None
    return isinstance(last, Part) and int(last.token_ids[-1]) in stop_token_ids
