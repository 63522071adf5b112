"""The object of a reward process: it loads the reward function once and scores samples in sequence."""

import resource

from verl_rc.config.task import RewardConfig
from verl_rc.rewards.dispatch import build_reward
from verl_rc.rewards.sample import RewardError, RewardOutput, RewardSample
from verl_rc.rewards.scorers import load_verifier


class LoadedReward:
    """The reward function of a configuration, within its memory limit."""

    def __init__(self, config: RewardConfig) -> None:
        """Load the function; ``problem`` says why it cannot be loaded."""
        self._problem: str | None = None
        try:
            self._reward = build_reward(config)
            if config.custom_reward_function.path is None:
                load_verifier()  # now, and not within the first sample's time
        except ValueError as error:
            self._problem = str(error)
            return
        if config.memory_limit_megabytes is not None:
            _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (config.memory_limit_megabytes << 20, hard_limit))

    def problem(self) -> str | None:
        """Why the function cannot be loaded; None: it is loaded."""
        return self._problem

    def score(self, sample: RewardSample) -> RewardOutput | RewardError:
        """The score of a sample, or why it has none."""
        try:
            return self._reward(sample)
        except RewardError as error:
            return error
