"""A pool of processes for reward functions: parallel scoring, with a time limit per call, so that no call can
hang the run."""

import os
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from time import monotonic

from verl_rc.config.task import RewardConfig
from verl_rc.distributed.child_process import ChildProcess, RemoteError
from verl_rc.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.workers.host import usable_cores

_ONE_THREAD = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Of each process; the driver's own values take precedence."""
_MOST_PROCESSES = 8
_TOLERATED_FAILURES = 2


class RewardPool:
    """Processes that score samples; one that hangs or dies is replaced, and its sample counts as failed."""

    def __init__(self, config: RewardConfig, start_timeout_seconds: float) -> None:
        """Start the processes and wait for the first to load the reward function.

        Raises ``ValueError`` when it cannot be loaded, or not in time.
        """
        self._config = config
        self._start_timeout = start_timeout_seconds
        self._failed_starts = 0
        self._tolerated_failures = 0  # before the first start succeeds, another attempt would fail too
        self._starting: list[ChildProcess] = []
        self._idle: list[ChildProcess] = []
        self._busy: dict[ChildProcess, int] = {}
        """Busy processes, and the index of their sample."""
        for _ in range(config.num_workers or min(usable_cores(), _MOST_PROCESSES)):
            self._start()
        try:
            while not self._idle:
                self._accept_loaded(self._finished())
        except ValueError:
            self.close()
            raise

    def results(self, samples: Sequence[RewardSample]) -> Iterator[tuple[int, RewardOutput | RewardError]]:
        """Yield the index and the result of each sample, in order of completion.

        When the caller stops before the last one, the remaining samples are dropped and their processes
        replaced.
        """
        waiting = deque(enumerate(samples))
        try:
            while waiting or self._busy:
                while waiting and self._idle:
                    place, sample = waiting.popleft()
                    process = self._idle.pop()
                    process.ask("score", sample, timeout_seconds=self._config.timeout_seconds)
                    self._busy[process] = place
                finished = self._finished()
                self._accept_loaded([process for process in finished if process in self._starting])
                for process in [process for process in finished if process in self._busy]:
                    place = self._busy.pop(process)
                    yield place, self._result(process, samples[place])
        finally:
            for process in list(self._busy):
                self._replace(process)

    def close(self) -> None:
        """End all processes."""
        for process in [*self._starting, *self._idle, *self._busy]:
            process.kill()
        self._starting, self._idle, self._busy = [], [], {}

    def _start(self) -> None:
        self._starting.append(
            ChildProcess(
                "verl_rc.rewards.process:LoadedReward",
                _ONE_THREAD | os.environ,
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
                problem = process.call("problem")
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
            self._failed_starts = 0
            self._tolerated_failures = _TOLERATED_FAILURES
            self._idle.append(process)

    def _result(self, process: ChildProcess, sample: RewardSample) -> RewardOutput | RewardError:
        """The answer of a finished process, or an error; the process is idle or replaced afterwards."""
        try:
            result: RewardOutput | RewardError = process.answer()
        except RemoteError as error:
            self._replace(process)
            return RewardError(f"the reward function did not return, {error}, for {sample}.")
        self._idle.append(process)
        return result

    def _replace(self, process: ChildProcess) -> None:
        self._busy.pop(process, None)
        process.kill()
        self._start()
