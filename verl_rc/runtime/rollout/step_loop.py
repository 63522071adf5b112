"""One thread owns the sampler (vLLM): it decodes step by step and runs the calls of other threads between two
steps.

Other threads only touch queues. ``submit`` queues samples and ``take`` returns their responses. ``call``
queues any other action, such as a weight update, and the owning thread runs the calls in order. A call may
wait until every sample submitted before it has ended; samples submitted after it wait for the call. Or its
action cuts the running samples, which continue afterwards:

    caller     submit(a, b)          call(load, after="all")      submit(c)
    thread       step  step  step (a and b end)      load               step  step (c ends)

    caller     submit(a, b)    call(cut, load)
    thread       step  step      cut  load      step  step (a and b end, with tokens of both weights)
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Generic, Literal, Protocol, TypeVar

from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError


class Sampler(Protocol):
    """An engine that is stepped by hand; only the thread that built it touches it."""

    capacity: int
    """Largest number of samples that run at the same time."""

    def begin(self, key: int, sample: Request) -> "Future[Any] | None":
        """Add a sample to the batch of the next steps; one that was cut continues behind its tokens so far.

        Returns a ``Future`` when the sample must wait before it can begin, as ``step`` does. None if it has
        begun.
        """

    def step(self) -> list[tuple[int, Any]]:
        """Decode one token of each running sample; returns key and response of those that ended.

        A ``Future`` in the place of a response, such as the answer of a tool, takes the sample out of the
        batch until it is done. An exception in its place goes to the reader of the box.
        """

    def proceed(self, key: int, answer: Any) -> Any:
        """Process the result of a sample's ``Future``; returns the response if the sample has ended, None if
        ``begin`` follows."""

    def cut(self, keys: Sequence[int]) -> None:
        """Take running samples out of the batch; their tokens stay for ``begin``."""

    def drop(self, keys: Sequence[int]) -> None:
        """Forget samples, whether they run or were cut."""

    def so_far(self, key: int) -> Any:
        """The response so far of a sample that has not ended. None if it has not begun."""


S = TypeVar("S", bound=Sampler)
T = TypeVar("T")
After = Literal["step", "priority", "all"]
"""A call waits for the end of the current step; for the end of all samples with priority; or until no sample
may be stepped, because all have ended or the limit of steps is reached."""
Box = list[tuple[int, Any]]
"""Number and response of each sample that has ended; the response is an ``EpisodeFailedError`` where the
environment failed. Only ``take`` may read it: the loop appends to it."""


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
    """Order of waiting samples."""

    PRIORITY = 0
    RESUMED = 1
    """Samples without priority that had begun before."""
    NEW = 2


@dataclass(frozen=True)
class _Submitted:
    """A submitted sample, and the box of its response."""

    sample: Request
    box: Box


class StepLoop(Generic[S]):
    """A sampler and the thread that owns it.

    Without work the thread waits for the next command. An exception in building or stepping ends the thread,
    and every later call raises it. An exception in a command is raised by its ``call``; the loop continues.
    """

    def __init__(
        self, build: Callable[[], S], max_concurrent: int | None = None, *, in_lockstep: bool = False
    ) -> None:
        """Build the sampler, in its thread. Raises what ``build`` raises.

        ``max_concurrent``: largest number of samples without priority that have begun and not ended. None
        means no limit. ``in_lockstep``: no step is made while a sample waits for an answer, so that the
        samples of a step do not depend on time.
        """
        self._max_concurrent = max_concurrent
        self._in_lockstep = in_lockstep
        self._changed = threading.Condition()
        """Guards commands, boxes and the failure, which all threads share, and wakes threads that wait for a
        change."""
        self._commands: deque[_Command] = deque()
        self._failure: BaseException | None = None
        self._waiting: list[tuple[_Level, int, int, _Submitted]] = []
        """A heap of samples that wait to begin or to continue, ordered by level, number and arrival. The
        arrival is the sample's key everywhere."""
        self._running: dict[int, _Submitted] = {}
        self._num_priority_running = 0
        self._unanswered: dict[int, _Submitted] = {}
        """Samples that wait for an answer."""
        self._answered: deque[tuple[int, Future[Any]]] = deque()
        """Keys and answers of samples whose answer has come."""
        self._cancelled: set[int] = set()
        """Numbers of samples that were cancelled while their submission was queued."""
        self._arrivals = count()
        self._holds: set[str] = set()
        self._steps_left: int | None = None
        """Steps that samples without priority may still be decoded. None means no limit."""
        self._activity: deque[tuple[float, float]] = deque(maxlen=_MAX_SPANS)
        self._required: set[int] = set()
        """Numbers of samples without priority that are decoded to their end, whatever the limit."""
        # A daemon: a step that hangs in vLLM must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(build,), name="step loop", daemon=True)
        self._thread.start()
        # Returns when the sampler is built, or raises what building raised.
        self.call(lambda _: None)

    # for other threads

    def submit(self, requests: Sequence[Request], box: Box) -> None:
        """Queue requests and return at once. The sample of each goes into ``box`` when it has ended; ``take``
        returns them."""

        def add(_: S) -> None:
            for request in requests:
                if request.has_priority or request.number not in self._cancelled:
                    self._enqueue(next(self._arrivals), _Submitted(request, box), _Level.NEW)

        self.post(add)

    def take(self, box: Box, at_least: int = 1, wait_seconds: float | None = None) -> Box:
        """Empty ``box`` once it holds ``at_least`` samples or ``wait_seconds`` are over (None: no limit).

        Returns number and response of each.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or len(box) >= at_least, wait_seconds)
            if self._failure is not None:
                raise self._failure
            samples = list(box)
            box.clear()
            return samples

    def call(self, action: Callable[[S], T], after: After = "step", hold: str = "", release: str = "") -> T:
        """Run ``action`` in the owning thread between two steps; returns its result or raises its exception.

        Args:
            action: Is called with the sampler.
            after: What the call waits for. Samples that are submitted later wait for this call.
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

    def cut(self, sampler: S) -> list[Request]:
        """Cut all running samples without priority and return them; they continue with the next step that is
        allowed."""
        cut = {key: item for key, item in self._running.items() if not item.sample.has_priority}
        sampler.cut(list(cut))
        for key, submitted in cut.items():
            del self._running[key]
            self._enqueue(key, submitted)
        return [submitted.sample for submitted in cut.values()]

    def cancel(self, sampler: S, numbers: Collection[int]) -> None:
        """Drop samples without priority by number, also those of submissions that are still queued.

        Samples that have ended stay in their box.
        """
        numbers = set(numbers)
        self._cancelled |= numbers
        dropped = {key for key, item in self._without_priority().items() if item.sample.number in numbers}
        sampler.drop(sorted(dropped))
        for key in dropped:
            self._running.pop(key, None)
            self._unanswered.pop(key, None)
        self._waiting = [entry for entry in self._waiting if entry[2] not in dropped]
        heapq.heapify(self._waiting)
        self._required -= numbers

    def so_far(self, sampler: S) -> Box:
        """Number and response so far of every sample without priority that has begun and not ended."""
        responses = [
            (submitted.sample.number, sampler.so_far(key))
            for key, submitted in self._without_priority().items()
        ]
        return [(number, response) for number, response in responses if response is not None]

    def _without_priority(self) -> dict[int, _Submitted]:
        """Samples without priority that have not ended, by key."""
        waiting = {arrival: submitted for _, _, arrival, submitted in self._waiting}
        submissions = waiting | self._running | self._unanswered
        return {key: item for key, item in submissions.items() if not item.sample.has_priority}

    def take_activity(self) -> list[tuple[float, float]]:
        """Start and end of each span of steps since the last call, seconds since 1970."""
        spans = list(self._activity)
        self._activity.clear()
        return spans

    def limit(self, steps: int) -> None:
        """Decode samples without priority in ``steps`` further steps; then only samples that ``require``
        names, to their end."""
        self._steps_left = steps
        self._required.clear()

    def require(self, numbers: Collection[int]) -> None:
        """Decode samples without priority to their end, whatever the limit; meanwhile all others are decoded,
        too."""
        unfinished = {submitted.sample.number for submitted in self._without_priority().values()}
        self._required |= unfinished & set(numbers)

    # in the owning thread

    def _enqueue(self, arrival: int, submitted: _Submitted, level: _Level = _Level.RESUMED) -> None:
        level = _Level.PRIORITY if submitted.sample.has_priority else level
        # The arrival comes before the sample, because samples cannot be compared.
        heapq.heappush(self._waiting, (level, submitted.sample.number, arrival, submitted))

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
                    self._deliver(sampler.step())
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
        # Under a hold no call waits for samples: it may be the one that releases the hold.
        if after == "step" or self._holds:
            return True
        if after == "priority":
            waits = any(submitted.sample.has_priority for submitted in self._unanswered.values())
            return not (waits or (self._may_step() and self._has_priority_samples()))
        return not (self._unanswered or self._may_step())

    def _may_step(self) -> bool:
        if self._holds or not (self._running or self._may_begin()):
            return False
        if self._in_lockstep and self._unanswered:
            return False
        return self._has_priority_samples() or self._may_decode()

    def _may_begin(self) -> bool:
        """Whether the first waiting sample may begin as soon as the batch has room."""
        if not self._waiting:
            return False
        level = self._waiting[0][0]
        if level != _Level.PRIORITY and (self._num_priority_running or not self._may_decode()):
            return False
        return level != _Level.NEW or self._max_concurrent is None or self._num_begun() < self._max_concurrent

    def _has_priority_samples(self) -> bool:
        """Whether a sample with priority runs or waits."""
        waits = bool(self._waiting) and self._waiting[0][0] == _Level.PRIORITY
        return waits or self._num_priority_running > 0

    def _may_decode(self) -> bool:
        """Whether samples without priority may be decoded."""
        return self._steps_left is None or self._steps_left > 0 or bool(self._required)

    def _run_command(self, command: _Command, sampler: S) -> None:
        try:
            command.answer.set_result(command.action(sampler))
        except BaseException as error:
            command.answer.set_exception(error)
            if not isinstance(error, Exception):  # such as an exit: it ends the thread too
                raise

    def _begin_waiting(self, sampler: S) -> None:
        """Begin samples while there is room."""
        while self._may_begin() and len(self._running) < sampler.capacity:
            _, _, key, submitted = heapq.heappop(self._waiting)
            self._running[key] = submitted
            self._num_priority_running += submitted.sample.has_priority
            if answer := sampler.begin(key, submitted.sample):
                self._leave_batch(key, answer)

    def _num_begun(self) -> int:
        """Number of samples without priority that run or wait for an answer; cut samples wait before new
        ones."""
        unanswered = sum(not submitted.sample.has_priority for submitted in self._unanswered.values())
        return len(self._running) - self._num_priority_running + unanswered

    def _leave_batch(self, key: int, answer: "Future[Any]") -> None:
        """Take a sample out of the batch until ``answer`` has come; another one may take its place."""
        self._unanswered[key] = self._remove_running(key)

        def notify(_: "Future[Any]") -> None:
            with self._changed:
                self._answered.append((key, answer))
                self._changed.notify_all()

        answer.add_done_callback(notify)

    def _return_to_batch(self, sampler: S) -> None:
        """Enqueue samples whose answers have come, or end them; a failed environment ends its sample.

        Raises any other exception in the place of an answer.
        """
        while self._answered:
            key, answer = self._answered.popleft()
            submitted = self._unanswered.pop(key, None)
            if submitted is None:  # cancelled meanwhile
                continue
            try:
                response = sampler.proceed(key, answer.result())
            except EpisodeFailedError as failure:
                sampler.drop([key])
                response = failure
            if response is None:
                self._enqueue(key, submitted)
            else:
                self._end_sample(submitted, response)

    def _remove_running(self, key: int) -> _Submitted:
        submitted = self._running.pop(key)
        self._num_priority_running -= submitted.sample.has_priority
        return submitted

    def _deliver(self, ended: Sequence[tuple[int, Any]]) -> None:
        if self._steps_left and len(self._running) > self._num_priority_running:
            self._steps_left -= 1
        for key, response in ended:
            if isinstance(response, Future):
                self._leave_batch(key, response)
            else:
                self._end_sample(self._remove_running(key), response)

    def _end_sample(self, submitted: _Submitted, response: Any) -> None:
        """Put the response of a sample into its box."""
        if not submitted.sample.has_priority:
            self._required.discard(submitted.sample.number)
        with self._changed:
            submitted.box.append((submitted.sample.number, response))
            self._changed.notify_all()
