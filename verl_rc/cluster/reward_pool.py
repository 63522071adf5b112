"""Reward functions in processes of their own: several samples at once, a time limit per call, and no call that can take the
run with it."""

from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from time import monotonic

from verl_rc.cluster.reward_process import NoAnswer, RewardProcess
from verl_rc.config.task import RewardConfig
from verl_rc.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.rewards.process import Answer, Failed, Ready, Refused
from verl_rc.workers.host import usable_cores

_MOST_PROCESSES = 8
_TOLERATED_FAILURES = 2


class RewardPool:
    """Processes that score samples; one that hangs or dies is replaced, and its sample has failed."""

    def __init__(self, config: RewardConfig, start_timeout_seconds: float) -> None:
        """Start the processes and wait for the first to load the reward function.

        Raises ``ValueError`` when it cannot be loaded, or not in time.
        """
        self._config = config
        self._start_timeout = start_timeout_seconds
        self._failed_starts = self._tolerated_failures = 0  # what has never started will not start the next time either
        self._starting: list[RewardProcess] = []
        self._idle: list[RewardProcess] = []
        self._busy: dict[RewardProcess, int] = {}
        """Processes at work, and the place of their sample."""
        for _ in range(config.num_workers or min(usable_cores(), _MOST_PROCESSES)):
            self._start()
        try:
            while not self._idle:
                self._admit(self._finished())
        except ValueError:
            self.close()
            raise

    def results(self, samples: Sequence[RewardSample]) -> Iterator[tuple[int, RewardOutput | RewardError]]:
        """What comes out for each sample, with its place, in the order in which they finish.

        Who stops asking before the last gives the rest up: their processes are replaced.
        """
        waiting = deque(enumerate(samples))
        try:
            while waiting or self._busy:
                while waiting and self._idle:
                    place, sample = waiting.popleft()
                    process = self._idle.pop()
                    process.ask(sample, self._config.timeout_seconds)
                    self._busy[process] = place
                finished = self._finished()
                self._admit([process for process in finished if process in self._starting])
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
        self._starting.append(RewardProcess(self._config, self._start_timeout))

    def _finished(self) -> list[RewardProcess]:
        """Wait until a process answers, dies or is late; those that did."""
        pending = {process.connection: process for process in (*self._starting, *self._busy)}
        earliest = min(process.deadline for process in pending.values())
        answered = wait(list(pending), max(0.0, earliest - monotonic()))
        return [process for connection, process in pending.items() if connection in answered or process.deadline <= monotonic()]

    def _admit(self, started: Sequence[RewardProcess]) -> None:
        """Take processes in whose reward function is loaded. Raises ``ValueError`` when it cannot be."""
        for process in started:
            self._starting.remove(process)
            answer = process.answer()
            if isinstance(answer, Ready):
                self._failed_starts, self._tolerated_failures = 0, _TOLERATED_FAILURES
                self._idle.append(process)
                continue
            process.kill()
            self._failed_starts += 1
            if isinstance(answer, Refused):
                raise ValueError(answer.reason)
            if self._failed_starts > self._tolerated_failures:
                raise ValueError(
                    f"a reward process must load {self._config.custom_reward_function.path or 'the built-in scorers'}, but it "
                    f"failed: {_described(answer)}. What it printed stands above."
                )
            self._start()

    def _result(self, process: RewardProcess, sample: RewardSample) -> RewardOutput | RewardError:
        """The answer of a process that has finished, or why there is none; the process is idle or replaced afterwards."""
        answer = process.answer()
        if isinstance(answer, RewardOutput | Failed):
            self._idle.append(process)
            return answer if isinstance(answer, RewardOutput) else RewardError(answer.reason)
        self._replace(process)
        return RewardError(f"the reward function did not return, {_described(answer)}, for {sample}.")

    def _replace(self, process: RewardProcess) -> None:
        self._busy.pop(process, None)
        process.kill()
        self._start()


def _described(answer: Answer | NoAnswer) -> str:
    """What a process did instead of what it was to do."""
    return answer.reason if isinstance(answer, NoAnswer) else f"it answered {answer}"
