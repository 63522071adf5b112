"""The driver's handle on one reward process: start it, ask it, notice when it takes too long or dies, end it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe

from verl_rc.cluster.environment import python_path
from verl_rc.config.task import RewardConfig
from verl_rc.rewards.process import Answer

_PROGRAM = "from verl_rc.rewards.process import main; main()"  # not -m: what it sends must not be of a module __main__
_EXIT_SECONDS = 5.0


@dataclass(frozen=True)
class NoAnswer:
    """The process hangs or is gone; it must be killed and replaced."""

    reason: str


class RewardProcess:
    """One process that scores one sample at a time; it and everything it started can be killed at any moment.

    A Python of its own, no fork: the driver runs Ray's threads, and a fork of it would inherit their locks.
    """

    def __init__(self, config: RewardConfig, timeout_seconds: float) -> None:
        """Start it; its first answer, due within ``timeout_seconds``, says whether it could load the reward function."""
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
        """Send what the process is to answer."""
        self._timeout_seconds = timeout_seconds
        self.deadline = time.monotonic() + timeout_seconds
        """When the answer must be there, in seconds of ``time.monotonic``."""
        with suppress(OSError):  # it died meanwhile: the answer will say so
            self.connection.send(message)

    def answer(self) -> Answer | NoAnswer:
        """What the process answers; waits until the deadline."""
        try:
            if not self.connection.poll(max(0.0, self.deadline - time.monotonic())):
                return NoAnswer(f"it took longer than {self._timeout_seconds:g} s")
            answer: Answer = self.connection.recv()
        except (EOFError, OSError):
            return NoAnswer(self._last_words())
        return answer

    def kill(self) -> None:
        """End the process and everything it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()

    def _last_words(self) -> str:
        """How a process that closed its connection ended."""
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            return "its process closed the connection"
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with exit code {code}"


def _environment() -> dict[str, str]:
    """The driver's, with this package on the path; threads of many processes would only be in each other's way."""
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "PYTHONPATH": python_path()}
