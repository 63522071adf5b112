"""The reward model's process, seen from the driver."""

from collections.abc import Sequence
from typing import Any

from verl_rc.cluster.environment import trainer_environment
from verl_rc.cluster.remote import Pending, RemoteProcess, wait_for_all
from verl_rc.config.task import RewardModelConfig
from verl_rc.workers.host import usable_cores


class RewardModel:
    """One process that holds the model.

    It claims no logical CPU, so that it fits beside trainer and engines: it computes while those wait. GPUs it claims are its
    own (``reward.reward_model.n_gpus_per_node``).
    """

    worker = "verl_rc.workers.reward_model_worker:RewardModelWorker"
    """What the process builds, as ``module:Class``."""

    def __init__(self, config: RewardModelConfig) -> None:
        """Start the process; ``build`` gives it its model."""
        self._config = config
        environment = trainer_environment(usable_cores(), one_node=False)
        self._process = RemoteProcess("reward model", environment, num_cpus=0, num_gpus=config.n_gpus_per_node)

    def build(self) -> list[Pending]:
        """Load the model; returns at once."""
        return [self._process.build(self.worker, config=self._config)]

    def score(self, conversations: Sequence[Sequence[dict[str, Any]]]) -> list[float | str]:
        """The model's score of each conversation in order, or the reason why it has none."""
        answers: list[float | str] = wait_for_all([self._process.call("score", conversations)])[0]
        return answers
