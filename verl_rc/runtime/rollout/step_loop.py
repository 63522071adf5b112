"""One thread owns the sampler (vLLM): it decodes step by step and runs the calls of other threads between two
steps.

Other threads only touch queues. ``submit`` queues requests and ``take`` returns their responses. ``call``
queues any other action, such as a weight update, and the owning thread runs the calls in order. A call may
wait until every request submitted before it has ended; requests submitted after it wait for the call. Or its
action cuts the running requests, which continue afterwards:

    caller     submit(a, b)          call(load, after="all")      submit(c)
    thread       step  step  step (a and b end)      load               step  step (c ends)

    caller     submit(a, b)    call(cut, load)
    thread       step  step      cut  load      step  step (a and b end, with tokens of both weights)
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar

from verl_rc.records.parts import Sample
from verl_rc.runtime.rollout.conversation import AnsweredSample
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.open_request import Box, OpenRequest


class Sampler(Protocol):
    """An engine that is stepped by hand; only the thread that built it touches it."""

    capacity: int
    """Largest number of requests that run at the same time."""

    def begin(self, opened: OpenRequest) -> "Future[AnsweredSample] | None":
        """Add a request to the batch of the next steps, behind its tokens so far.

        Returns the environment's reply when the request must wait for one before it can begin. None if it has
        begun.
        """

    def step(self, running: Mapping[int, OpenRequest]) -> list[tuple[OpenRequest, Any]]:
        """Decode one token of each running request; returns those that ended, with their responses.

        A ``Future`` of an ``AnsweredSample`` in the place of a response takes the request out of the batch
        until it is done. An exception in its place goes to the reader of the box.
        """

    def cut(self, requests: Sequence[OpenRequest]) -> None:
        """Take running requests out of the batch; their tokens stay for ``begin``."""

    def drop(self, requests: Sequence[OpenRequest]) -> None:
        """End requests without a response, whether they run, wait or were cut."""

    def so_far(self, opened: OpenRequest) -> Sample:
        """The response so far of a request that has begun."""


S = TypeVar("S", bound=Sampler)
T = TypeVar("T")
After = Literal["step", "priority", "all"]
"""A call waits for the end of the current step; for the end of all requests with priority; or until no
request may be stepped, because all have ended or the limit of steps is reached."""

_MAX_GAP_SECONDS = 0.005
"""A shorter pause between two steps does not end a span of activity."""
_MAX_SPANS = 10_000


@dataclass(frozen=True)
class _Command:
    """An action between two steps."""

    action: Callable[[Any], Any]
    answer: "Future[Any]"
    after: After


class _Level(IntEnum):
    """Order of waiting requests."""

    PRIORITY = 0
    RESUMED = 1
    """Requests without priority that had begun before."""
    NEW = 2


class StepLoop(Generic[S]):
    """A sampler and the thread that owns it.

    Without work the thread waits for the next command. An exception in building or stepping ends the thread,
    and every later call raises it. An exception in a command is raised by its ``call``; the loop continues.
    """

    def __init__(
        self, build: Callable[[], S], max_concurrent: int | None = None, *, in_lockstep: bool = False
    ) -> None:
        """Build the sampler, in its thread. Raises what ``build`` raises.

        ``max_concurrent``: largest number of requests without priority that have begun and not ended. None
        means no limit. ``in_lockstep``: no step is made while a request waits for a reply, so that the
        samples of a step do not depend on time.
        """
        self._max_concurrent = max_concurrent
        self._in_lockstep = in_lockstep
        self._changed = threading.Condition()
        """Guards commands, boxes and the failure, which all threads share, and wakes threads that wait for a
        change."""
        self._commands: deque[_Command] = deque()
        self._failure: BaseException | None = None
        # The book: every open request is in exactly one of these three. Two are by key.
        self._waiting: list[tuple[_Level, int, int, OpenRequest]] = []
        """A heap of requests that wait to begin or to continue, ordered by level, number and key."""
        self._running: dict[int, OpenRequest] = {}
        self._unanswered: dict[int, OpenRequest] = {}
        """Requests that wait for a reply."""
        self._num_priority_running = 0
        """Counted as they come and go: a sum over all that run would take 0.1 ms, several times a step."""
        self._answered: deque[tuple[OpenRequest, Future[AnsweredSample]]] = deque()
        """Replies that have come, and their requests."""
        self._cancelled: set[int] = set()
        """Numbers of requests that were cancelled while their submission was queued."""
        self._keys = count()
        self._holds: set[str] = set()
        self._steps_left: int | None = None
        """Steps that requests without priority may still be decoded. None means no limit."""
        self._activity: deque[tuple[float, float]] = deque(maxlen=_MAX_SPANS)
        self._required: set[int] = set()
        """Numbers of requests without priority that are decoded to their end, whatever the limit."""
        # A daemon: a step that hangs in vLLM must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(build,), name="step loop", daemon=True)
        self._thread.start()
        # Returns when the sampler is built, or raises what building raised.
        self.call(lambda _: None)

    # for other threads

    def submit(self, requests: Sequence[Request], box: Box) -> None:
        """Queue requests and return at once. Their responses go into ``box``, from which ``take`` returns
        them."""

        def add(_: S) -> None:
            for request in requests:
                if request.has_priority or request.number not in self._cancelled:
                    self._enqueue(OpenRequest(next(self._keys), request, box))

        self.post(add)

    def take(
        self,
        box: Box,
        at_least: int = 1,
        wait_seconds: float | None = None,
        linger_seconds: float | None = None,
    ) -> Box:
        """Empty ``box`` once it holds ``at_least`` responses or ``wait_seconds`` are over (None: no limit).

        With ``linger_seconds`` this is the limit from the first response on. Returns number and response of
        each.
        """
        with self._changed:
            if linger_seconds is not None:
                self._changed.wait_for(lambda: self._failure is not None or box, wait_seconds)
                wait_seconds = linger_seconds if box else 0.0
            self._changed.wait_for(lambda: self._failure is not None or len(box) >= at_least, wait_seconds)
            if self._failure is not None:
                raise self._failure
            ended = list(box)
            box.clear()
            return ended

    def call(self, action: Callable[[S], T], after: After = "step", hold: str = "", release: str = "") -> T:
        """Run ``action`` in the owning thread between two steps; returns its result or raises its exception.

        Args:
            action: Is called with the sampler.
            after: What the call waits for. Requests that are submitted later wait for this call.
            hold: Name of a hold that the action begins, even if it fails. No step runs until another call
                releases it.
            release: Name of a hold that ends if the action succeeds.
        """
        # Outside the lock: the owning thread needs it to run the command.
        return self.post(action, after, hold, release).result()

    def post(
        self,
        action: Callable[[S], T],
        after: After = "step",
        hold: str = "",
        release: str = "",
        *,
        overtakes: bool = False,
    ) -> "Future[T]":
        """Queue a ``call`` and return at once. With ``overtakes`` it runs before all queued calls."""

        def run(sampler: S) -> T:
            if hold:
                self._holds.add(hold)
            result = action(sampler)
            self._holds.discard(release)
            return result

        command = _Command(run, Future(), after)
        with self._changed:
            if self._failure is not None:
                raise self._failure
            self._commands.insert(0 if overtakes else len(self._commands), command)
            self._changed.notify_all()
        return command.answer

    # for actions, in the owning thread

    def cut(self, sampler: S) -> None:
        """Cut all running requests without priority; they continue with the next step that is allowed."""
        cut = [opened for opened in self._running.values() if not opened.request.has_priority]
        sampler.cut(cut)
        for opened in cut:
            self._enqueue(self._running.pop(opened.key))

    def cancel(self, sampler: S, numbers: Collection[int]) -> None:
        """Drop requests without priority by number, also those of submissions that are still queued.

        Responses that have ended stay in their box.
        """
        numbers = set(numbers)
        self._cancelled |= numbers
        dropped = [opened for opened in self._without_priority() if opened.request.number in numbers]
        sampler.drop(dropped)
        for opened in dropped:
            self._running.pop(opened.key, None)
            self._unanswered.pop(opened.key, None)
        keys = {opened.key for opened in dropped}
        self._waiting = [entry for entry in self._waiting if entry[2] not in keys]
        heapq.heapify(self._waiting)
        self._required -= numbers

    def so_far(self, sampler: S) -> list[Sample]:
        """The response so far of every request without priority that has begun and not ended."""
        return [sampler.so_far(opened) for opened in self._without_priority() if opened.has_begun]

    def _without_priority(self) -> list[OpenRequest]:
        """Requests without priority that have not ended."""
        waiting = (opened for _, _, _, opened in self._waiting)
        requests = (*waiting, *self._running.values(), *self._unanswered.values())
        return [opened for opened in requests if not opened.request.has_priority]

    def take_activity(self) -> list[tuple[float, float]]:
        """Start and end of each span of steps since the last call, seconds since 1970."""
        spans = list(self._activity)
        self._activity.clear()
        return spans

    def limit(self, steps: int) -> None:
        """Decode requests without priority in ``steps`` further steps; then only requests that ``require``
        names, to their end."""
        self._steps_left = steps
        self._required.clear()

    def require(self, numbers: Collection[int]) -> None:
        """Decode requests without priority to their end, whatever the limit; meanwhile all others are
        decoded, too."""
        unfinished = {opened.request.number for opened in self._without_priority()}
        self._required |= unfinished & set(numbers)

    # in the owning thread

    def _enqueue(self, opened: OpenRequest) -> None:
        request = opened.request
        level = _Level.RESUMED if opened.has_begun else _Level.NEW
        level = _Level.PRIORITY if request.has_priority else level
        # The key comes before the request, because requests cannot be compared.
        heapq.heappush(self._waiting, (level, request.number, opened.key, opened))

    def _run(self, build: Callable[[], S]) -> None:
        try:
            sampler = build()
            while True:
                self._wait_for_work()
                self._return_to_batch(sampler)
                if (command := self._next_command()) is not None:
                    self._run_command(command, sampler)
                elif self._may_step():
                    start = time.time()
                    self._begin_waiting(sampler)
                    self._deliver(sampler.step(self._running))
                    self._record_activity(start, time.time())
        except BaseException as error:
            with self._changed:
                self._failure = error  # the next call raises it
                for command in self._commands:
                    command.answer.set_exception(error)
                self._commands.clear()
                self._changed.notify_all()
            if not isinstance(error, Exception):
                raise

    def _record_activity(self, start: float, end: float) -> None:
        if self._activity and start - self._activity[-1][1] < _MAX_GAP_SECONDS:
            start = self._activity.pop()[0]
        self._activity.append((start, end))

    def _wait_for_work(self) -> None:
        """Wait until an answer has come, or the first command or a step may run."""
        with self._changed:
            if not self._commands:  # so no submission is queued
                self._cancelled.clear()
            self._changed.wait_for(lambda: self._answered or self._may_run_command() or self._may_step())

    def _next_command(self) -> _Command | None:
        """Take the first command from the queue, if it may run now. The caller must run it at once."""
        with self._changed:
            return self._commands.popleft() if self._may_run_command() else None

    def _may_run_command(self) -> bool:
        if not self._commands:
            return False
        after = self._commands[0].after
        # Under a hold no call waits for requests: it may be the one that releases the hold.
        if after == "step" or self._holds:
            return True
        if after == "priority":
            waits = any(opened.request.has_priority for opened in self._unanswered.values())
            return not (waits or (self._may_step() and self._has_priority_requests()))
        return not (self._unanswered or self._may_step())

    def _may_step(self) -> bool:
        if self._holds or not (self._running or self._may_begin()):
            return False
        if self._in_lockstep and self._unanswered:
            return False
        return self._has_priority_requests() or self._may_decode()

    def _may_begin(self) -> bool:
        """Whether the first waiting request may begin as soon as the batch has room."""
        if not self._waiting:
            return False
        level = self._waiting[0][0]
        if level != _Level.PRIORITY and (self._num_priority_running or not self._may_decode()):
            return False
        return level != _Level.NEW or self._max_concurrent is None or self._num_begun() < self._max_concurrent

    def _has_priority_requests(self) -> bool:
        """Whether a request with priority runs or waits."""
        waits = bool(self._waiting) and self._waiting[0][0] == _Level.PRIORITY
        return waits or self._num_priority_running > 0

    def _may_decode(self) -> bool:
        """Whether requests without priority may be decoded."""
        return self._steps_left is None or self._steps_left > 0 or bool(self._required)

    def _run_command(self, command: _Command, sampler: S) -> None:
        try:
            command.answer.set_result(command.action(sampler))
        except BaseException as error:
            command.answer.set_exception(error)
            if not isinstance(error, Exception):  # such as an exit: it ends the thread too
                raise

    def _begin_waiting(self, sampler: S) -> None:
        """Begin requests while there is room."""
        while self._may_begin() and len(self._running) < sampler.capacity:
            opened = heapq.heappop(self._waiting)[-1]
            self._running[opened.key] = opened
            self._num_priority_running += opened.request.has_priority
            reply = sampler.begin(opened)
            opened.has_begun = True
            if reply is not None:
                self._leave_batch(opened, reply)

    def _num_begun(self) -> int:
        """Number of requests without priority that run or wait for a reply; cut requests wait before new
        ones."""
        unanswered = sum(not opened.request.has_priority for opened in self._unanswered.values())
        return len(self._running) - self._num_priority_running + unanswered

    def _leave_batch(self, opened: OpenRequest, reply: "Future[AnsweredSample]") -> None:
        """Take a request out of the batch until ``reply`` has come; another one may take its place."""
        self._remove_running(opened)
        self._unanswered[opened.key] = opened

        def notify(_: "Future[AnsweredSample]") -> None:
            with self._changed:
                self._answered.append((opened, reply))
                self._changed.notify_all()

        reply.add_done_callback(notify)

    def _return_to_batch(self, sampler: S) -> None:
        """Enqueue requests whose replies have come, or end them; a failed environment ends its request.

        Raises any other exception in the place of a reply.
        """
        while self._answered:
            opened, reply = self._answered.popleft()
            if self._unanswered.pop(opened.key, None) is None:  # cancelled meanwhile
                continue
            try:
                answered = reply.result()
            except EpisodeFailedError as failure:
                sampler.drop([opened])
                self._end(opened, failure)
                continue
            opened.sample = answered.sample
            if answered.continues:
                self._enqueue(opened)
            else:
                self._end(opened, answered.sample)

    def _remove_running(self, opened: OpenRequest) -> None:
        del self._running[opened.key]
        self._num_priority_running -= opened.request.has_priority

    def _deliver(self, ended: Sequence[tuple[OpenRequest, Any]]) -> None:
        if self._steps_left and len(self._running) > self._num_priority_running:
            self._steps_left -= 1
        for opened, response in ended:
            if isinstance(response, Future):
                self._leave_batch(opened, response)
            else:
                self._remove_running(opened)
                self._end(opened, response)

    def _end(self, opened: OpenRequest, response: Any) -> None:
        """Put a response into its box."""
        if not opened.request.has_priority:
            self._required.discard(opened.request.number)
        with self._changed:
            opened.box.append((opened.request.number, response))
            self._changed.notify_all()
