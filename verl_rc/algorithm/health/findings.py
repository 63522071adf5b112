"""The findings about a step, as a record: guards read it, not the names of metrics."""

from dataclasses import dataclass

from verl_rc.algorithm.health.ranges import HealthHistory


@dataclass(frozen=True)
class Findings:
    """What rollout correction shows of a step: before its update, or by it where the actor corrects."""

    next_gap_limit: float | None
    """Limit of the mean gap from now on, nats. None means not calibrated yet."""
    health: HealthHistory
    """With the causes of this step."""
    k3_kl: float | None = None
    """Mismatch of rollout and train policy, nats per token. None if nothing was measured."""
    mean_gap: float | None = None
    """Mean ``|train - rollout log-prob|``, nats. None if nothing was measured, or it proves nothing."""
    gap_limit: float | None = None
    """Limit of ``mean_gap``, nats. None means that it has none."""
    has_cause: bool = False
    """Whether a cause of the gap is named."""
