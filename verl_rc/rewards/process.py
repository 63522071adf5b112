"""The main function of a reward process, which loads the reward function once and scores samples in sequence.

Its first command-line argument is the file descriptor of its connection to the driver.
"""

import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from verl_rc.config.task import RewardConfig
from verl_rc.rewards.dispatch import build_reward
from verl_rc.rewards.sample import RewardError, RewardOutput, RewardSample
from verl_rc.rewards.scorers import load_verifier

_GRACE_SECONDS = 5


@dataclass(frozen=True)
class Ready:
    """First answer of a process that has loaded the reward function."""


@dataclass(frozen=True)
class LoadFailed:
    """First answer of a process that cannot load the reward function."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """Answer for a sample that could not be scored."""

    reason: str


Answer = Ready | LoadFailed | Failed | RewardOutput


def serve(connection: Connection) -> None:
    """Receive a ``RewardConfig`` and answer ``Ready`` or ``LoadFailed``; then answer every ``RewardSample``
    until the other end closes."""
    config: RewardConfig = connection.recv()
    try:
        reward = build_reward(config)
        if config.custom_reward_function.path is None:
            load_verifier()  # now, and not within the first sample's time
    except ValueError as error:
        connection.send(LoadFailed(str(error)))
        return
    connection.send(Ready())
    if config.memory_limit_megabytes is not None:
        _limit_memory(config.memory_limit_megabytes << 20)
    while True:
        try:
            sample: RewardSample = connection.recv()
        except EOFError:
            return
        # The driver ends a process that takes too long; this ends it if the driver itself is gone.
        signal.alarm(math.ceil(config.timeout_seconds) + _GRACE_SECONDS)
        answer = _answer(reward, sample)
        signal.alarm(0)
        connection.send(answer)


def _answer(reward: Callable[[RewardSample], RewardOutput], sample: RewardSample) -> RewardOutput | Failed:
    try:
        return reward(sample)
    except RewardError as error:
        return Failed(str(error))


def _limit_memory(num_bytes: int) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, hard_limit))


def main() -> None:
    """Entry point."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # what the reward function starts must not hold the connection open
    with Connection(descriptor) as connection, suppress(ConnectionError):  # the driver may be gone
        serve(connection)
