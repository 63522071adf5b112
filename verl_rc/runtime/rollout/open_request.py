"""A request in an engine, from its submission to its end."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

from verl_rc.records.parts import Part, Sample, num_tokens
from verl_rc.runtime.rollout.conversation import AnsweredSample, Conversations
from verl_rc.runtime.rollout.engine import Request

Box = list[tuple[int, Any]]
"""Number and response of each request that has ended; the response is an ``EpisodeFailedError`` where the
environment failed. Only ``StepLoop.take`` may read it: the loop appends to it."""


@dataclass(eq=False)
class OpenRequest:
    """All that an engine knows of a request that has not ended.

    ``conversations`` of its methods are those of the engine. None means that no request has an episode; a
    request without an episode ends with its first turn.
    """

    key: int
    """The engine's number of the request; ``request.number`` is its caller's."""
    request: Request
    box: Box
    """The response goes into it."""
    sample: Sample = field(init=False)
    """The response so far, without tokens that ``decoding`` has."""
    has_begun: bool = False
    decoding: Any = None
    """The sampler's own record while it decodes the request. None at other times."""

    def __post_init__(self) -> None:
        """Continue the response of the request."""
        self.sample = replace(self.request.request.so_far, number=self.request.number, finished=False)

    def begin(self, conversations: Conversations | None) -> "Future[AnsweredSample] | None":
        """The environment's reply that the response waits for. None if it can be sampled."""
        request, options, parts = self.request.request, self.request.options, self.sample.parts
        last = parts[-1] if parts else None
        stopped = isinstance(last, Part) and int(last.token_ids[-1]) in options.stop_token_ids
        if self.has_begun or not (stopped or num_tokens(parts) >= request.limit(options)):
            return None
        # The engine that sampled the turn, or the run, was lost before the environment replied.
        return self._reply(conversations, replace(self.sample, finished=stopped))

    def extended(self, parts: Sequence[Part]) -> Sample:
        """The response so far with further ``parts``."""
        return replace(self.sample, parts=[*self.sample.parts, *parts])

    def end_turn(
        self, conversations: Conversations | None, parts: Sequence[Part], stopped: bool
    ) -> "Sample | Future[AnsweredSample]":
        """The response if it ends with this turn, else the reply that it waits for.

        ``parts`` are the rest of the turn. ``stopped``: a stop token has ended it (False: a limit).
        """
        sample = replace(self.extended(parts), finished=stopped)
        return self._reply(conversations, sample) or sample

    def _reply(self, conversations: Conversations | None, sample: Sample) -> "Future[AnsweredSample] | None":
        """The environment's reply to the last turn of ``sample``. None without an environment."""
        request = self.request.request
        if conversations is None or request.episode is None:
            return None
        self.sample = sample
        return conversations.request_reply(request, sample, request.limit(self.request.options))

    def close(self, conversations: Conversations | None) -> None:
        """Close the episode, if it has begun."""
        if conversations is not None and self.has_begun and self.request.request.episode is not None:
            conversations.close(self.request.request)
