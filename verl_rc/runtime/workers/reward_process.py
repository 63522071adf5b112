"""The object of a reward process: it loads the reward function once and scores samples, those of an ``async
def`` at the same time."""

from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from verl_rc.algorithm.rewards.dispatch import build_reward
from verl_rc.algorithm.rewards.sample import RewardError, RewardOutput, RewardSample
from verl_rc.algorithm.rewards.scorers import load_verifier
from verl_rc.config.task import RewardConfig
from verl_rc.runtime.distributed.event_loop import EventLoop, LateError, within

Result = RewardOutput | RewardError


class LoadedReward:
    """The reward function of a configuration, within its limits of memory and time."""

    def __init__(self, config: RewardConfig) -> None:
        """Load the function; ``problem`` says why it cannot be loaded."""
        self._seconds = config.timeout_seconds
        self._loop: EventLoop | None = None
        self._pending: dict[Future[Result], int] = {}
        """Calls under way, and the place of each one's sample."""
        self._problem: str | None = None
        try:
            self._reward = build_reward(config)
            if config.custom_reward_function.path is None:
                load_verifier()  # now, and not within the first sample's time
        except ValueError as error:
            self._problem = str(error)
            return

    def problem(self) -> str | None:
        """The reason why the function cannot be loaded. None if it is loaded."""
        return self._problem

    def is_async(self) -> bool:
        """Whether the function is an ``async def``: its calls end at their time limit by themselves."""
        return self._reward.is_async

    def score(self, samples: Sequence[tuple[int, RewardSample]]) -> list[tuple[int, Result]]:
        """Start the calls of ``samples``, each with its place, and wait until at least one call has ended.

        Returns place and result of those that have ended, samples of earlier calls among them.
        """
        ended: list[tuple[int, Result]] = []
        for place, sample in samples:
            try:
                started = self._reward.start(sample)
            except RewardError as error:
                ended.append((place, error))
                continue
            if isinstance(started, RewardOutput):
                ended.append((place, started))
            else:
                self._pending[self._loop_here().start(self._bounded(started, sample))] = place
        ready = wait(self._pending, 0 if ended else None, FIRST_COMPLETED).done
        return ended + [(self._pending.pop(future), future.result()) for future in ready]

    def _loop_here(self) -> EventLoop:
        """The event loop of this process, started for the first ``async def``."""
        if self._loop is None:
            self._loop = EventLoop("rewards")
        return self._loop

    async def _bounded(self, call: Coroutine[Any, Any, RewardOutput], sample: RewardSample) -> Result:
        try:
            return await within(self._seconds, call)
        except LateError:
            return RewardError.without_answer(f"it took longer than {self._seconds:g} s", sample)
        except RewardError as error:
            return error
