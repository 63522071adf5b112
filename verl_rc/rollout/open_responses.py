"""Responses that have begun and not ended: what there is of each, and the turns of those that call tools."""

from collections.abc import Sequence
from concurrent.futures import Future

from verl_rc.rollout.conversation import Conversations
from verl_rc.rollout.response import Ended, Response
from verl_rc.rollout.step_loop import QueuedSample


class OpenResponses:
    """The book of a sampler, by the step loop's keys."""

    def __init__(self, conversations: Conversations | None) -> None:
        """``conversations`` answers tool calls; None: samples call no tools."""
        self._conversations = conversations
        self._open: dict[str, tuple[QueuedSample, Response]] = {}

    def begin(self, key: str, sample: QueuedSample) -> "tuple[Response, Future[list[str]] | None]":
        """What there is of a response that begins or goes on, and the answers of tools that it waits for, if there are any."""
        if key in self._open:
            return self[key], None
        response = Response.from_parts(sample.request)
        self._open[key] = sample, response
        if self._conversations is None or not response.ends_with(sample.options.stop_token_ids):
            return response, None
        response.stopped = True  # the engine that sampled it was lost while its tools were at work
        return response, self._conversations.after_turn(response)

    def __getitem__(self, key: str) -> Response:
        """What there is of a response that has begun."""
        return self._open[key][1]

    def get(self, key: str) -> Response | None:
        """Return the same; None: it has not begun."""
        return self[key] if key in self._open else None

    def replace(self, key: str, response: Response) -> None:
        """Keep what there is of a response now."""
        self._open[key] = self._open[key][0], response

    def drop(self, key: str) -> None:
        """Forget a response, if it has begun."""
        self._open.pop(key, None)

    def end_turn(self, key: str, turn: Ended) -> "Ended | Response | Future[list[str]]":
        """The response if it has ended with its turn, else the answers of tools that it waits for.

        Without tools ``turn`` itself: its reader checks it. Raises like ``Ended.whole``.
        """
        if self._conversations is None:
            del self._open[key]
            return turn
        response = turn.whole(int(key))
        self.replace(key, response)
        return self._conversations.after_turn(response) or self._end(key)

    def proceed(self, key: str, answers: Sequence[str]) -> Response | None:
        """Take the tools' answers; returns the response if they have ended it."""
        assert self._conversations is not None
        sample, response = self._open[key]
        response, goes_on = self._conversations.with_answers(response, answers, sample.request.limit(sample.options))
        self.replace(key, response)
        return None if goes_on else self._end(key)

    def _end(self, key: str) -> Response:
        return self._open.pop(key)[1]
