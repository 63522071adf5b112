"""One thread owns the sampler (vLLM): it decodes step by step and runs the calls of other threads between two steps.

Other threads only touch queues. ``submit`` queues samples and ``take`` returns their responses. ``call`` queues everything else,
such as a weight update, and the owning thread runs the calls in their order. A call may ask for an empty sampler: it waits until
every sample submitted before it has ended, and samples submitted after it wait for the call.

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
    """Waiting samples begin in ascending order of this number."""
    request: GenerationRequest
    options: SamplingOptions
    ahead: bool = False
    """Priority: the sample begins before those without, and no other one begins until it has ended. Running samples continue."""


class Sampler(Protocol):
    """An engine that is stepped by hand; only the thread that built it touches it."""

    capacity: int
    """Largest number of samples that run at the same time."""

    def begin(self, key: str, sample: Sample) -> None:
        """Add a sample to the batch of the next steps."""

    def step(self) -> list[tuple[str, Any]]:
        """Decode one token of each running sample; returns key and response of those that ended."""


S = TypeVar("S", bound=Sampler)
T = TypeVar("T")
Box = list[tuple[int, Any]]
"""Number and response of each sample that has ended. Only ``take`` may read it: the loop appends to it."""


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps."""

    action: Callable[[Any], Any]
    answer: "Future[Any]"
    when_empty: bool


@dataclass(frozen=True)
class _Submitted:
    """A sample that was submitted, and the box its response goes to."""

    sample: Sample
    box: Box


class StepLoop(Generic[S]):
    """A sampler and the thread that owns it.

    Without work the thread waits for the next command. An exception in building or stepping ends the thread, and every later call
    raises it. An exception in a command is raised by its ``call``, and the loop continues.
    """

    def __init__(self, build: Callable[[], S]) -> None:
        """Build the sampler, in its thread. Raises what ``build`` raises."""
        self._changed = threading.Condition()
        """Guards commands, boxes and the end, which all threads share, and wakes the threads that wait for a change."""
        self._commands: deque[_Command] = deque()
        self._end: BaseException | None = None
        self._waiting: list[tuple[bool, int, int, _Submitted]] = []
        """A heap of samples that wait to begin, ordered by priority (ahead first), number and arrival."""
        self._running: dict[str, _Submitted] = {}
        self._ahead_running = 0
        self._arrivals = count()
        self._holds: set[str] = set()
        # A daemon: a step that hangs in vLLM must not keep the process alive.
        self._thread = threading.Thread(target=self._run, args=(build,), name="step loop", daemon=True)
        self._thread.start()
        # Returns when the sampler is built, or raises what building raised.
        self.call(lambda _: None)

    # called from outside

    def submit(self, samples: Sequence[Sample], box: Box) -> None:
        """Queue samples and return at once. Each goes into ``box`` when it has ended; ``take`` returns them."""

        def add(_: S) -> None:
            for sample in samples:
                # The arrival comes before the sample, because samples cannot be compared.
                heapq.heappush(self._waiting, (not sample.ahead, sample.number, next(self._arrivals), _Submitted(sample, box)))

        self._post(add, when_empty=False)

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

    def call(self, action: Callable[[S], T], when_empty: bool = False, hold: str = "", release: str = "") -> T:
        """Run ``action`` in the owning thread between two steps; returns its result or raises its exception.

        Args:
            action: What to do with the sampler.
            when_empty: Wait until all samples submitted before have ended; samples submitted later wait for this call.
            hold: No step runs after this action has begun, even if it fails, until another call releases the same word.
            release: Ends the hold of this word if the action succeeds.
        """

        def held(sampler: S) -> T:
            if hold:
                self._holds.add(hold)
            result = action(sampler)
            self._holds.discard(release)
            return result

        # Outside the lock: the owning thread needs it to run the command.
        return self._post(held, when_empty).result()

    def stop(self) -> None:
        """End the thread after its current step; later calls raise ``RuntimeError``."""
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
            self._finish(error)  # the next call raises it
            if not isinstance(error, Exception):
                raise

    def _next_command(self) -> _Command | None:
        """Wait for work. Returns the first command if it may run now, None if a step may run."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_run_command() or self._may_step() or self._end is not None)
            return self._commands.popleft() if self._may_run_command() else None

    def _may_run_command(self) -> bool:
        # A call for an empty sampler does not wait for samples that are held: it may be the one that releases them.
        return bool(self._commands) and not (self._commands[0].when_empty and self._may_step())

    def _may_step(self) -> bool:
        return bool(self._running or self._waiting) and not self._holds

    def _run_command(self, command: _Command, sampler: S) -> None:
        try:
            command.answer.set_result(command.action(sampler))
        except BaseException as error:
            command.answer.set_exception(error)
            if not isinstance(error, Exception):  # such as an exit: it ends the thread too
                raise

    def _begin_waiting(self, sampler: S) -> None:
        """Begin samples while there is room and no running sample has priority over them."""
        while self._waiting and len(self._running) < sampler.capacity:
            behind, _, arrival, submitted = self._waiting[0]
            if behind and self._ahead_running:
                return
            heapq.heappop(self._waiting)
            self._running[str(arrival)] = submitted
            self._ahead_running += submitted.sample.ahead
            sampler.begin(str(arrival), submitted.sample)

    def _deliver(self, ended: Sequence[tuple[str, Any]]) -> None:
        if not ended:
            return
        with self._changed:
            for key, response in ended:
                submitted = self._running.pop(key)
                self._ahead_running -= submitted.sample.ahead
                submitted.box.append((submitted.sample.number, response))
            self._changed.notify_all()
