"""Updates of actor and critic: what the driver requests of each rank, and what a rank reports."""

from dataclasses import dataclass

from verl_rc.algorithm.ppo.corrector import Corrector
from verl_rc.algorithm.ppo.in_actor import Measured
from verl_rc.config.models import ActorConfig
from verl_rc.metrics import Metric
from verl_rc.records.optimizer_step import OptimizerStep


@dataclass(frozen=True)
class UpdateRequest:
    """The task of all ranks of the actor in the updates of a step."""

    corrector: Corrector
    """Who corrects, by the configuration with the current threshold."""
    policy_version: int
    """Version of the weights before the first update."""
    gap_limit: float | None = None
    """The largest mean gap of engine and trainer before the first update that a correction in the actor
    accepts, nats. None means no limit."""
    learning_rate_factor: float = 1.0
    """Multiplies the learning rate of the schedule in all updates of the step."""
    entropy_coeff: float | None = None
    """Weight of the entropy bonus in all updates of the step. None means the configured one."""
    measures_survival: bool = False
    """Measure the share of the step's updates that survives the engines' rounding."""

    def options_of_step(self, actor: ActorConfig) -> ActorConfig:
        """The actor's options in this step's updates."""
        if self.entropy_coeff is None:
            return actor
        return actor.model_copy(update={"entropy_coeff": self.entropy_coeff})


@dataclass(frozen=True)
class UpdateReport:
    """One rank's report on the updates of a step."""

    metrics: list[Metric]
    """Metrics to be reduced over ranks."""
    steps: list[OptimizerStep]
    """Every optimizer step, the same on all ranks."""


@dataclass(frozen=True)
class ActorReport(UpdateReport):
    """One rank's report on the actor's updates of a step."""

    loss_tokens: list[int]
    """Tokens that entered the loss of each mini-batch, over all ranks; 0 where it was skipped."""
    measured: Measured | None = None
    """The measurements of the correction of all mini-batches, over all ranks. None where the driver
    corrects."""
