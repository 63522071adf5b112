"""A pool of processes for reward functions: parallel scoring, with a time limit per call, so that no call can
hang the run."""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from time import monotonic

from verl_rc.cluster.ray_session import python_path
from verl_rc.config.task import RewardConfig
from verl_rc.rewards import RewardError, RewardOutput, RewardSample
from verl_rc.rewards.process import Answer, Failed, LoadFailed, Ready
from verl_rc.workers.host import usable_cores

# not -m: what it sends must not be of a module __main__
_PROGRAM = "from verl_rc.rewards.process import main; main()"
_EXIT_SECONDS = 5.0


@dataclass(frozen=True)
class ProcessFailure:
    """The process hangs or has died; it must be killed and replaced."""

    reason: str


class RewardProcess:
    """One process that scores one sample at a time; it and its children can be killed at any moment.

    It is a new Python process, not a fork: a fork would inherit locks held by the driver's Ray threads.
    """

    def __init__(self, config: RewardConfig, timeout_seconds: float) -> None:
        """Start the process; its first answer, due within ``timeout_seconds``, is ``Ready`` or
        ``LoadFailed``."""
        self.connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,  # a group of processes that can be killed as one
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.ask(config, timeout_seconds)

    def ask(self, message: object, timeout_seconds: float) -> None:
        """Send a request to the process."""
        self._timeout_seconds = timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        """Deadline of the answer, in seconds of ``time.monotonic``."""
        with suppress(OSError):  # it died meanwhile: the answer will say so
            self.connection.send(message)

    def answer(self) -> Answer | ProcessFailure:
        """Wait for the answer of the process, until the deadline."""
        try:
            if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                return ProcessFailure(f"it took longer than {self._timeout_seconds:g} s")
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            return ProcessFailure(self._exit_reason())
        return answer

    def kill(self) -> None:
        """Kill the process and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _exit_reason(self) -> str:
        """How the process ended, in words, after it closed its connection."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def _environment() -> dict[str, str]:
    """The driver's environment with this package on the path and one thread per process, to avoid
    oversubscription."""
    return {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **os.environ,
        "PYTHONPATH": python_path(),
    }


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
        self._failed_starts = self._tolerated_failures = (
            0  # what has never started will not start the next time either
        )
        self._starting: list[RewardProcess] = []
        self._idle: list[RewardProcess] = []
        self._busy: dict[RewardProcess, int] = {}
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
                    process.ask(sample, self._config.timeout_seconds)
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
        self._starting.append(RewardProcess(self._config, self._start_timeout))

    def _finished(self) -> list[RewardProcess]:
        """Wait until a process answers, dies or exceeds its deadline; returns these processes."""
        pending = {process.connection: process for process in (*self._starting, *self._busy)}
        earliest = min(process.deadline for process in pending.values())
        answered = wait(list(pending), max(0.0, earliest - monotonic()))
        return [
            process
            for connection, process in pending.items()
            if connection in answered or process.deadline <= monotonic()
        ]

    def _accept_loaded(self, started: Sequence[RewardProcess]) -> None:
        """Add processes that have loaded the reward function. Raises ``ValueError`` when loading failed."""
        for process in started:
            self._starting.remove(process)
            answer = process.answer()
            if isinstance(answer, Ready):
                self._failed_starts, self._tolerated_failures = 0, _TOLERATED_FAILURES
                self._idle.append(process)
                continue
            process.kill()
            self._failed_starts += 1
            if isinstance(answer, LoadFailed):
                raise ValueError(answer.reason)
            if self._failed_starts > self._tolerated_failures:
                raise ValueError(
                    "a reward process must load "
                    f"{self._config.custom_reward_function.path or 'the built-in scorers'}, but it failed: "
                    f"{_described(answer)}. What it printed stands above."
                )
            self._start()

    def _result(self, process: RewardProcess, sample: RewardSample) -> RewardOutput | RewardError:
        """The answer of a finished process, or an error; the process is idle or replaced afterwards."""
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


def _described(answer: Answer | ProcessFailure) -> str:
    """The failure of a process in words."""
    return answer.reason if isinstance(answer, ProcessFailure) else f"it answered {answer}"
