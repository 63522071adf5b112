"""One thread owns the sampler (vLLM): it decodes step by step and runs the calls of other threads between two
steps.

Other threads only touch queues. ``submit`` queues samples and ``take`` returns their responses. ``call``
queues everything else, such as a weight update, and the owning thread runs the calls in their order. A call
may wait until every sample submitted before it has ended; samples submitted after it wait for the call. Or
its action cuts what runs, which goes on afterwards:

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

from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.environment import EpisodeFailedError


class Sampler(Protocol):
    """An engine that is stepped by hand; only the thread that built it touches it."""

    capacity: int
    """Largest number of samples that run at the same time."""

    def begin(self, key: int, sample: QueuedSample) -> "Future[Any] | None":
        """Add a sample to the batch of the next steps; one that was cut continues behind its tokens so far.

        Returns what the sample waits for before it may begin, as ``step`` does; None: it has begun.
        """

    def step(self) -> list[tuple[int, Any]]:
        """Decode one token of each running sample; returns key and response of those that ended.

        A ``Future`` in the place of a response: the sample leaves the batch until that is done, such as the
        answer of a tool. An exception in its place is for the reader of the box.
        """

    def proceed(self, key: int, answer: Any) -> Any:
        """Take what a sample has waited for; returns its response if that has ended it, None if ``begin`` is
        to follow."""

    def cut(self, keys: Sequence[int]) -> None:
        """Take running samples out of the batch; what was sampled of them is kept for ``begin``."""

    def drop(self, keys: Sequence[int]) -> None:
        """Take running samples out of the batch for good, and forget those that were cut."""

    def so_far(self, key: int) -> Any:
        """The response so far of a sample that has begun and not ended; None when it has not begun."""


S = TypeVar("S", bound=Sampler)
T = TypeVar("T")
After = Literal["step", "priority", "all"]
"""What a call waits for: the end of the current step; of all samples with priority; or until no sample may be
stepped any more, because all have ended or the limit of steps is reached."""
Box = list[tuple[int, Any]]
"""Number and response of each sample that has ended, an ``EpisodeFailedError`` where its environment failed.
Only ``take`` may read it: the loop appends to it."""


_SAME_SPAN_SECONDS = 0.005
"""A shorter pause between two steps belongs to the span of activity."""
_SPANS_KEPT = 10_000


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps."""

    action: Callable[[Any], Any]
    answer: "Future[Any]"
    after: After


class _Rank(IntEnum):
    """Who goes first among those that wait."""

    AHEAD = 0
    BEGUN = 1
    """Samples without priority that were cut or away before."""
    NEW = 2


@dataclass(frozen=True)
class _Submitted:
    """A sample that was submitted, and the box its response goes to."""

    sample: QueuedSample
    box: Box


class StepLoop(Generic[S]):
    """A sampler and the thread that owns it.

    Without work the thread waits for the next command. An exception in building or stepping ends the thread,
    and every later call raises it. An exception in a command is raised by its ``call``, and the loop
    continues.
    """

    def __init__(
        self, build: Callable[[], S], max_concurrent: int | None = None, *, in_lockstep: bool = False
    ) -> None:
        """Build the sampler, in its thread. Raises what ``build`` raises.

        ``max_concurrent``: samples without priority that may have begun and not ended; None: no limit.
        ``in_lockstep``: no step is made while a sample waits for an answer, so that what a step decodes does
        not depend on time.
        """
        self._max_concurrent = max_concurrent
        self._in_lockstep = in_lockstep
        self._changed = threading.Condition()
        """Guards commands, boxes and the end, which all threads share, and wakes the threads that wait for a
        change."""
        self._commands: deque[_Command] = deque()
        self._end: BaseException | None = None
        self._waiting: list[tuple[_Rank, int, int, _Submitted]] = []
        """A heap of samples that wait to begin or to go on, ordered by rank, number and arrival. A sample's
        arrival is its key everywhere."""
        self._running: dict[int, _Submitted] = {}
        self._ahead_running = 0
        self._away: dict[int, _Submitted] = {}
        """Samples that wait for an answer."""
        self._back: deque[tuple[int, Future[Any]]] = deque()
        """Samples whose answer has come."""
        self._cancelled: set[int] = set()
        """Numbers of samples that were cancelled while their submission was queued."""
        self._arrivals = count()
        self._holds: set[str] = set()
        self._steps_left: int | None = None
        """Steps that samples without priority may still be decoded; None: no limit."""
        self._activity: deque[tuple[float, float]] = deque(maxlen=_SPANS_KEPT)
        self._required: set[int] = set()
        """Numbers of samples without priority that are decoded to their end, beyond the limit too."""
        # A daemon: a step that hangs in vLLM must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(build,), name="step loop", daemon=True)
        self._thread.start()
        # Returns when the sampler is built, or raises what building raised.
        self.call(lambda _: None)

    # called from outside

    def submit(self, samples: Sequence[QueuedSample], box: Box) -> None:
        """Queue samples and return at once. Each goes into ``box`` when it has ended; ``take`` returns
        them."""

        def add(_: S) -> None:
            for sample in samples:
                if sample.ahead or sample.number not in self._cancelled:
                    self._wait(next(self._arrivals), _Submitted(sample, box), _Rank.NEW)

        self.post(add)

    def take(self, box: Box, at_least: int = 1, wait_seconds: float | None = None) -> Box:
        """Empty ``box`` once it holds ``at_least`` samples or ``wait_seconds`` are over (None: no limit).

        Returns number and response of each.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(box) >= at_least, wait_seconds)
            if self._end is not None:
                raise self._end
            taken = list(box)
            box.clear()
            return taken

    def call(self, action: Callable[[S], T], after: After = "step", hold: str = "", release: str = "") -> T:
        """Run ``action`` in the owning thread between two steps; returns its result or raises its exception.

        Args:
            action: What to do with the sampler.
            after: What to wait for. Samples that are submitted later wait for this call.
            hold: No step runs after this action has begun, even if it fails, until another call releases the
                same word.
            release: Ends the hold of this word if the action succeeds.
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
        """Queue what ``call`` runs, and return at once. With ``overtakes`` it waits for no call that was
        queued before."""

        def held(sampler: S) -> T:
            if hold:
                self._holds.add(hold)
            result = action(sampler)
            self._holds.discard(release)
            return result

        command = _Command(held, Future(), after)
        with self._changed:
            if self._end is not None:
                raise self._end
            if overtakes:
                self._commands.appendleft(command)
            else:
                self._commands.append(command)
            self._changed.notify_all()
        return command.answer

    def _finish(self, reason: BaseException) -> None:
        with self._changed:
            self._end = reason
            for command in self._commands:
                command.answer.set_exception(reason)
            self._commands.clear()
            self._changed.notify_all()

    # in the owning thread: for actions

    def cut(self, sampler: S) -> list[QueuedSample]:
        """Cut all running samples without priority and return them; they go on when steps may be made
        again."""
        keys = [key for key, submitted in self._running.items() if not submitted.sample.ahead]
        sampler.cut(keys)
        cut = [self._running.pop(key) for key in keys]
        for key, submitted in zip(keys, cut, strict=True):
            self._wait(key, submitted)
        return [submitted.sample for submitted in cut]

    def cancel(self, sampler: S, numbers: Collection[int]) -> None:
        """Drop these samples without priority, whether they run, wait, are away, or come with a submission
        that is still queued.

        Those that have ended stay in their box.
        """
        numbers = set(numbers)
        self._cancelled |= numbers
        dropped = {key for key, one in self._open().items() if one.sample.number in numbers}
        sampler.drop(sorted(dropped))
        for key in dropped:
            self._running.pop(key, None)
            self._away.pop(key, None)
        self._waiting = [entry for entry in self._waiting if entry[2] not in dropped]
        heapq.heapify(self._waiting)
        self._required -= numbers

    def so_far(self, sampler: S) -> Box:
        """Number and response so far of every sample without priority that has begun and not ended."""
        responses = [(one.sample.number, sampler.so_far(key)) for key, one in self._open().items()]
        return [(number, response) for number, response in responses if response is not None]

    def _open(self) -> dict[int, _Submitted]:
        """Samples without priority that wait, run or are away."""
        waiting = {arrival: submitted for _, _, arrival, submitted in self._waiting}
        everything = {**waiting, **self._running, **self._away}
        return {key: one for key, one in everything.items() if not one.sample.ahead}

    def take_activity(self) -> list[tuple[float, float]]:
        """Beginning and end of each span in which steps were made since the last call, seconds since 1970."""
        spans = list(self._activity)
        self._activity.clear()
        return spans

    def limit(self, steps: int) -> None:
        """Decode samples without priority in ``steps`` further steps, and then those that ``require`` names,
        to their end."""
        self._steps_left = steps
        self._required.clear()

    def require(self, numbers: Collection[int]) -> None:
        """Decode these samples without priority to their end, beyond the limit too; all others are decoded
        beside them."""
        self._required |= {one.sample.number for one in self._open().values()} & set(numbers)

    # in the owning thread

    def _wait(self, arrival: int, submitted: _Submitted, rank: _Rank = _Rank.BEGUN) -> None:
        rank = _Rank.AHEAD if submitted.sample.ahead else rank
        # The arrival comes before the sample, because samples cannot be compared.
        heapq.heappush(self._waiting, (rank, submitted.sample.number, arrival, submitted))

    def _run(self, build: Callable[[], S]) -> None:
        try:
            sampler = build()
            while True:
                self._wait_for_work()
                self._return_to_batch(sampler)
                if (command := self._next_command()) is not None:
                    self._run_command(command, sampler)
                elif self._may_step():
                    began = time.time()
                    self._begin_waiting(sampler)
                    self._deliver(sampler.step())
                    self._note_activity(began, time.time())
        except BaseException as error:
            self._finish(error)  # the next call raises it
            if not isinstance(error, Exception):
                raise

    def _note_activity(self, began: float, ended: float) -> None:
        if self._activity and began - self._activity[-1][1] < _SAME_SPAN_SECONDS:
            began = self._activity.pop()[0]
        self._activity.append((began, ended))

    def _wait_for_work(self) -> None:
        """Wait until answers have come, or the first command or a step may run."""
        with self._changed:
            if not self._commands:  # so no submission is queued
                self._cancelled.clear()
            self._changed.wait_for(lambda: self._back or self._may_run_command() or self._may_step())

    def _next_command(self) -> _Command | None:
        """The first command if it may run now; it leaves the queue, so that nothing may fail before it
        runs."""
        with self._changed:
            return self._commands.popleft() if self._may_run_command() else None

    def _may_run_command(self) -> bool:
        if not self._commands:
            return False
        after = self._commands[0].after
        # No call waits for samples that are held: it may be the one that releases them.
        if after == "step" or self._holds:
            return True
        away = [submitted.sample.ahead for submitted in self._away.values()]
        if after == "priority":
            return not (any(away) or (self._may_step() and self._has_priority()))
        return not (away or self._may_step())

    def _may_step(self) -> bool:
        if self._holds or not (self._running or self._may_begin()):
            return False
        if self._in_lockstep and self._away:
            return False
        return self._has_priority() or self._may_decode()

    def _may_begin(self) -> bool:
        """Whether the first sample that waits has to wait for no other one, but for room."""
        if not self._waiting:
            return False
        rank = self._waiting[0][0]
        if rank != _Rank.AHEAD and (self._ahead_running or not self._may_decode()):
            return False
        return rank != _Rank.NEW or self._max_concurrent is None or self._num_begun() < self._max_concurrent

    def _has_priority(self) -> bool:
        """Whether a sample with priority runs or waits."""
        return self._ahead_running > 0 or bool(self._waiting and self._waiting[0][3].sample.ahead)

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
            self._ahead_running += submitted.sample.ahead
            if answer := sampler.begin(key, submitted.sample):
                self._leave_batch(key, answer)

    def _num_begun(self) -> int:
        """Samples without priority that run or are away; those that wait to go on come before new ones."""
        away = sum(not submitted.sample.ahead for submitted in self._away.values())
        return len(self._running) - self._ahead_running + away

    def _leave_batch(self, key: int, answer: "Future[Any]") -> None:
        """Take the sample out until ``answer`` has come; others may take its place."""
        self._away[key] = self._no_longer_runs(key)

        def notify(_: "Future[Any]") -> None:
            with self._changed:
                self._back.append((key, answer))
                self._changed.notify_all()

        answer.add_done_callback(notify)

    def _return_to_batch(self, sampler: S) -> None:
        """Samples whose answers have come wait to begin again, or end, as those do whose environment failed.

        Raises what else was raised instead of an answer.
        """
        while self._back:
            key, answer = self._back.popleft()
            submitted = self._away.pop(key, None)
            if submitted is None:  # cancelled meanwhile
                continue
            try:
                response = sampler.proceed(key, answer.result())
            except EpisodeFailedError as failure:
                sampler.drop([key])
                response = failure
            if response is None:
                self._wait(key, submitted)
            else:
                self._put(submitted, response)

    def _no_longer_runs(self, key: int) -> _Submitted:
        submitted = self._running.pop(key)
        self._ahead_running -= submitted.sample.ahead
        return submitted

    def _deliver(self, ended: Sequence[tuple[int, Any]]) -> None:
        if self._steps_left and len(self._running) > self._ahead_running:
            self._steps_left -= 1
        for key, response in ended:
            if isinstance(response, Future):
                self._leave_batch(key, response)
            else:
                self._put(self._no_longer_runs(key), response)

    def _put(self, submitted: _Submitted, response: Any) -> None:
        """Into its box: the sample has ended."""
        if not submitted.sample.ahead:
            self._required.discard(submitted.sample.number)
        with self._changed:
            submitted.box.append((submitted.sample.number, response))
            self._changed.notify_all()
