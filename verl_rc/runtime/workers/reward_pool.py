"""A pool of processes for reward functions: parallel scoring, with a time limit per call, so that no call can
hang the run."""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from time import monotonic

from verl_rc.algorithm.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.config.schema import secret_variables
from verl_rc.config.task import RewardConfig
from verl_rc.runtime.distributed.child_process import ChildProcess, ProcessLostError, RemoteError
from verl_rc.runtime.workers.host import usable_cores
from verl_rc.runtime.workers.reward_process import Result

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Variables of each process; the driver's own values take precedence."""
_MOST_PROCESSES = 8
_CANCEL_SECONDS = 5.0
"""Seconds after its time limit that a call of an ``async def`` has to be cancelled."""
_END_SECONDS = 5.0
"""Seconds that a process has to end its event loop."""
_TOLERATED_FAILURES = 2


class RewardPool:
    """Processes that score samples; one that hangs or dies is replaced, and its sample counts as failed."""

    def __init__(self, config: RewardConfig, start_timeout_seconds: float) -> None:
        """Start the processes and wait for the first to load the reward function.

        Raises ``ValueError`` when it cannot be loaded, or not in time, or when a variable of
        ``reward.pass_env`` is not set.
        """
        self._config = config
        self.hidden = secret_variables(os.environ, config.pass_env, "reward.pass_env")
        """Names of the environment variables that the processes do not get."""
        self._start_timeout = start_timeout_seconds
        self._failed_starts = 0
        self._tolerated_failures = 0  # before the first start succeeds, another attempt would fail too
        self._starting: list[ChildProcess] = []
        self._idle: list[ChildProcess] = []
        self._busy: dict[ChildProcess, list[int]] = {}
        """Busy processes, and the indices of the samples that each calls the function with."""
        self._answer_seconds = config.timeout_seconds
        for _ in range(config.num_workers or min(usable_cores(), _MOST_PROCESSES)):
            self._start()
        try:
            while not self._idle:
                self._accept_loaded(self._finished())
        except ValueError:
            self.close()
            raise

    def results(self, samples: Sequence[RewardSample]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each sample, in order of completion.

        When the caller stops before the last one, the remaining samples are dropped and their processes
        replaced.
        """
        waiting = deque(range(len(samples)))
        suspects: deque[int] = deque()
        """Samples that a process died with, and not with one alone: each is called alone."""
        try:
            while waiting or suspects or self._busy:
                while self._idle and (suspects or waiting):
                    share = 1 if suspects else math.ceil(len(waiting) / len(self._idle))
                    self._ask(self._idle.pop(), samples, [], suspects or waiting, share)
                finished = self._finished()
                self._accept_loaded([process for process in finished if process in self._starting])
                for process in [process for process in finished if process in self._busy]:
                    yield from self._answers(process, samples, waiting, suspects)
        finally:
            for process in list(self._busy):
                self._replace(process)

    def close(self) -> None:
        """End all processes; those that wait may clean up."""
        for process in self._idle:
            process.connection.close()
        for process in self._idle:
            process.end(_END_SECONDS)
        for process in [*self._starting, *self._busy]:
            process.kill()
        self._starting, self._idle, self._busy = [], [], {}

    def _start(self) -> None:
        self._starting.append(
            ChildProcess(
                "verl_rc.runtime.workers.reward_process:LoadedReward",
                {**_ONE_THREAD, **os.environ, **dict.fromkeys(self.hidden)},
                wait=False,
                timeout_seconds=self._start_timeout,
                config=self._config,
            )
        )

    def _finished(self) -> list[ChildProcess]:
        """Wait until a process answers, dies or exceeds its deadline; returns these processes."""
        pending = {process.connection: process for process in (*self._starting, *self._busy)}
        earliest = min(process.deadline for process in pending.values())
        answered = wait(list(pending), max(0.0, earliest - monotonic()))
        return [
            process
            for connection, process in pending.items()
            if connection in answered or process.deadline <= monotonic()
        ]

    def _accept_loaded(self, started: Sequence[ChildProcess]) -> None:
        """Add processes that have loaded the reward function. Raises ``ValueError`` when loading failed."""
        for process in started:
            self._starting.remove(process)
            try:
                process.answer()
                problem = process.call("problem", timeout_seconds=self._start_timeout)
                is_async = not problem and process.call("is_async", timeout_seconds=self._start_timeout)
            except RemoteError as error:
                process.kill()
                self._failed_starts += 1
                if self._failed_starts > self._tolerated_failures:
                    function = self._config.custom_reward_function.path or "the built-in scorers"
                    raise ValueError(
                        f"a reward process must load {function}, but it failed: {error}. Its output is above."
                    ) from None
                self._start()
                continue
            if problem is not None:
                process.kill()
                raise ValueError(problem)
            if is_async:
                self._answer_seconds = self._config.timeout_seconds + _CANCEL_SECONDS
            self._failed_starts = 0
            self._tolerated_failures = _TOLERATED_FAILURES
            self._idle.append(process)

    def _ask(
        self,
        process: ChildProcess,
        samples: Sequence[RewardSample],
        under_way: Sequence[int],
        queue: deque[int],
        most: int,
    ) -> None:
        """Give a process up to ``most`` samples of the queue, as far as its calls may overlap; without a call
        it is idle."""
        room = self._config.max_concurrent - len(under_way)
        places = [queue.popleft() for _ in range(min(most, room, len(queue)))]
        if not under_way and not places:
            self._idle.append(process)
            return
        new_samples = [(place, samples[place]) for place in places]
        process.ask("score", new_samples, timeout_seconds=self._answer_seconds)
        self._busy[process] = [*under_way, *places]

    def _answers(
        self,
        process: ChildProcess,
        samples: Sequence[RewardSample],
        waiting: deque[int],
        suspects: deque[int],
    ) -> list[tuple[int, Result]]:
        """The answers of a process, which gets further samples, or is idle or replaced afterwards."""
        places = self._busy.pop(process)
        try:
            answers = _checked(process.answer(), places)
        except RemoteError as error:
            self._replace(process)
            if len(places) > 1:
                suspects.extend(places)
                return []
            return [(place, RewardError.without_answer(error, samples[place])) for place in places]
        ended = {place for place, _ in answers}
        self._ask(process, samples, [place for place in places if place not in ended], waiting, len(waiting))
        return answers

    def _replace(self, process: ChildProcess) -> None:
        self._busy.pop(process, None)
        process.kill()
        self._start()


def _checked(answers: object, places: Sequence[int]) -> list[tuple[int, Result]]:
    """The answers of a process. Raises ``ProcessLostError`` for anything but results of ``places``: a reward
    function can write into its process's connection."""
    checked: list[tuple[int, Result]] = []
    for answer in answers if isinstance(answers, list) and answers else [None]:
        match answer:
            case (int(place), (RewardOutput() | RewardError()) as result) if place in places:
                checked.append((place, result))
            case _:
                raise ProcessLostError("its process wrote something else than results into its connection")
    return checked
