"""One thread owns the sampler (vLLM): it makes one decode step after the other, and between two steps does what others ask for.

Calls from outside only touch queues. Samples come in by ``submit`` and are fetched by ``take``; everything else, such as a
weight update, comes in by ``call`` and is carried out by the owning thread, in the order of the calls. A call may ask for an
empty sampler: it waits until every sample handed over before it has ended, and those handed over after it wait for the call.

    caller     submit(a, b)          call(load, when_empty=True)      submit(c)
    thread       step  step  step (a and b end)      load               step  step (c ends)
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import Any, Generic, Protocol, TypeVar

from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions


@dataclass(frozen=True)
class Sample:
    """One response to sample."""

    number: int
    """Its place in the order: of the samples that wait, the lowest begins first."""
    request: GenerationRequest
    options: SamplingOptions
    ahead: bool = False
    """It begins before all that are not; of these none begins as long as it has not ended. Those that have begun go on."""


class Sampler(Protocol):
    """An engine that is stepped by hand; only the thread that built it touches it."""

    capacity: int
    """How many samples may be under way at once."""

    def begin(self, key: str, sample: Sample) -> None:
        """Have the next steps work on a sample too."""

    def step(self) -> list[tuple[str, Any]]:
        """One more token for the samples under way; returns key and response of those that ended."""


S = TypeVar("S", bound=Sampler)
T = TypeVar("T")
Box = list[tuple[int, Any]]
"""Where number and response of samples are put as they end. It belongs to the loop until ``take`` empties it."""


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps."""

    action: Callable[[Any], Any]
    answer: "Future[Any]"
    when_empty: bool


@dataclass(frozen=True)
class _Submitted:
    """A sample that was handed over."""

    sample: Sample
    box: Box


class StepLoop(Generic[S]):
    """A sampler and the thread that owns it.

    Nothing to do: the thread waits for the next command. An exception in building or stepping ends the thread, and every call
    raises it from then on; one in a command is raised by the ``call`` that asked for it, and the loop goes on.
    """

    def __init__(self, build: Callable[[], S]) -> None:
        """Build the sampler, in its thread. Raises what ``build`` raises."""
        self._changed = threading.Condition()
        """Guards what both sides touch, and wakes whoever waits for a change of it: commands, boxes, the end."""
        self._commands: deque[_Command] = deque()
        self._end: BaseException | None = None
        self._waiting: list[tuple[bool, int, int, _Submitted]] = []
        """A heap of samples handed over but not begun; in order: ahead of others or not, number, arrival."""
        self._under_way: dict[str, _Submitted] = {}
        self._ahead_under_way = 0
        self._arrivals = count()
        self._holds: set[str] = set()
        self._thread = threading.Thread(target=self._run, args=(build,), name="step loop", daemon=True)
        self._thread.start()
        self.call(lambda _: None)

    # called from outside

    def submit(self, samples: Sequence[Sample], box: Box) -> None:
        """Hand samples over; returns at once. They are put into ``box`` as they end, from where ``take`` takes them."""

        def add(_: S) -> None:
            for sample in samples:
                heapq.heappush(self._waiting, (not sample.ahead, sample.number, next(self._arrivals), _Submitted(sample, box)))

        self._post(add, when_empty=False)

    def take(self, box: Box, at_least: int = 1, wait_seconds: float | None = None) -> Box:
        """Number and response of the samples in ``box``, which is emptied, once they are ``at_least`` so many or
        ``wait_seconds`` are over (None: for ever)."""
        with self._changed:
            self._changed.wait_for(lambda: self._end is not None or len(box) >= at_least, wait_seconds)
            if self._end is not None:
                raise self._end
            taken = list(box)
            box.clear()
            return taken

    def call(self, action: Callable[[S], T], when_empty: bool = False, hold: str = "", release: str = "") -> T:
        """Have the owning thread do ``action`` between two steps; returns its result or raises its exception.

        Args:
            action: What to do with the sampler.
            when_empty: Only when all samples handed over before have ended. What is handed over after it waits meanwhile.
            hold: From the action's beginning on no step is made, even if it fails, until another call releases the same word.
            release: Ends the hold of this word, if the action succeeds.
        """

        def held(sampler: S) -> T:
            if hold:
                self._holds.add(hold)
            result = action(sampler)
            self._holds.discard(release)
            return result

        return self._post(held, when_empty).result()

    def stop(self) -> None:
        """End the thread after the step that it is making; calls raise ``RuntimeError`` from then on."""
        self._finish(RuntimeError("the engine's step loop was stopped."))
        self._thread.join()

    def _post(self, action: Callable[[S], T], when_empty: bool) -> "Future[T]":
        command = _Command(action, Future(), when_empty)
        with self._changed:
            if self._end is not None:
                raise self._end
            self._commands.append(command)
            self._changed.notify_all()
        return command.answer

    def _finish(self, reason: BaseException) -> None:
        with self._changed:
            self._end = self._end or reason
            for command in self._commands:
                command.answer.set_exception(self._end)
            self._commands.clear()
            self._changed.notify_all()

    # in the owning thread

    def _run(self, build: Callable[[], S]) -> None:
        try:
            sampler = build()
            while self._end is None:
                if command := self._next_command():
                    self._run_command(command, sampler)
                elif self._end is None:
                    self._begin_waiting(sampler)
                    self._deliver(sampler.step())
        except BaseException as error:
            self._finish(error)  # whoever calls next raises it
            if not isinstance(error, Exception):
                raise

    def _next_command(self) -> _Command | None:
        """The first in the queue if it may be carried out now, else None if there is something to sample; waits for either."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_run_command() or self._may_step() or self._end is not None)
            return self._commands.popleft() if self._may_run_command() else None

    def _may_run_command(self) -> bool:
        # A call for an empty sampler does not wait for samples that are held: it may be the one that releases them.
        return bool(self._commands) and not (self._commands[0].when_empty and self._may_step())

    def _may_step(self) -> bool:
        return bool(self._under_way or self._waiting) and not self._holds

    def _run_command(self, command: _Command, sampler: S) -> None:
        try:
            command.answer.set_result(command.action(sampler))
        except BaseException as error:
            command.answer.set_exception(error)
            if not isinstance(error, Exception):  # such as an exit: it ends the thread too
                raise

    def _begin_waiting(self, sampler: S) -> None:
        """Begin samples, as far as there is room and none that goes ahead holds them back."""
        while self._waiting and len(self._under_way) < sampler.capacity:
            behind, _, arrival, handed = self._waiting[0]
            if behind and self._ahead_under_way:
                return
            heapq.heappop(self._waiting)
            self._under_way[str(arrival)] = handed
            self._ahead_under_way += handed.sample.ahead
            sampler.begin(str(arrival), handed.sample)

    def _deliver(self, ended: Sequence[tuple[str, Any]]) -> None:
        if not ended:
            return
        with self._changed:
            for key, response in ended:
                handed = self._under_way.pop(key)
                self._ahead_under_way -= handed.sample.ahead
                handed.box.append((handed.sample.number, response))
            self._changed.notify_all()
