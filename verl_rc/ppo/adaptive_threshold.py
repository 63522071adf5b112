"""A rejection threshold that follows the acceptance it leads to."""

import math
from dataclasses import dataclass, replace

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import CorrectionStatistics, bound_for_acceptance

_MEMORY = 0.9
"""Share of the old threshold's logarithm that a batch leaves in place."""


@dataclass(frozen=True)
class AdaptiveThreshold:
    """``rollout_rs_target_acceptance``: u of the bounds 1/u to u, moved after every batch; belongs in a checkpoint.

    ``ln u <- 0.9 ln u + 0.1 ln u*`` with u* the smallest bound under which the batch just seen would have had the wished share
    accepted. A fixed threshold rejects more and more as the policies drift apart; this one holds what is kept.
    """

    threshold: float
    """u in force, >= 1."""
    rule: str
    target: float
    """Share of tokens or rows to accept, in (0, 1)."""

    @classmethod
    def of(cls, config: RolloutCorrectionConfig) -> "AdaptiveThreshold | None":
        """What a configuration asks for, before the first batch; None when its thresholds are fixed."""
        if config.rollout_rs_target_acceptance is None:
            return None
        [(rule, bound)] = config.rejection_bounds().items()
        return cls(bound.upper, rule, config.rollout_rs_target_acceptance)

    def config(self, config: RolloutCorrectionConfig) -> RolloutCorrectionConfig:
        """``config`` with the threshold in force."""
        return config.model_copy(update={"rollout_rs_threshold": self.threshold})

    def updated(self, statistics: CorrectionStatistics) -> "AdaptiveThreshold":
        """The threshold after a batch, of which ``statistics`` (with full diagnostics) hold the histograms."""
        wanted = bound_for_acceptance(statistics.numbers(), self.rule, self.target)
        if math.isnan(wanted):
            return self
        return replace(self, threshold=math.exp(_MEMORY * math.log(self.threshold) + (1 - _MEMORY) * math.log(wanted)))
