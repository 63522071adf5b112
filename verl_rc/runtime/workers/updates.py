"""Updates of actor and critic: what the driver requests of each rank, and what a rank reports."""

from dataclasses import dataclass

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics
from verl_rc.metrics import Metric
from verl_rc.records.optimizer_step import OptimizerStep
from verl_rc.runtime.weight_sync.proof import LogProbGap


@dataclass(frozen=True)
class UpdateRequest:
    """The task of all ranks of the actor in the updates of a step."""

    correction: RolloutCorrectionConfig
    """Rollout correction with the current threshold."""
    policy_version: int
    """Version of the weights before the first update."""
    gap_limit: float | None = None
    """Bypass mode: the largest mean that ``ActorReport.gap`` may have, nats. None means no limit."""
    measures_survival: bool = False
    """Measure the share of the step's updates that survives the engines' rounding."""
    compares_proximal: bool = False
    """Compare interpolated log-probs of the proximal policy with ``TrainBatch.proximal_log_probs``, which
    this step has recomputed for it."""


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
    """Tokens that entered the loss of each mini-batch, over all ranks; 0: it was skipped."""
    correction: CorrectionStatistics | None = None
    """Where the actor corrects: rollout correction over all mini-batches and ranks."""
    gap: LogProbGap | None = None
    """Where the actor corrects: gap of the mini-batches up to the first in which a token has two finite
    log-probs; None when an update was made before it, or there is none."""
    signatures: CorrectionStatistics | None = None
    """Where the actor corrects, with full diagnostics: signatures of the first mini-batch, over all ranks."""
