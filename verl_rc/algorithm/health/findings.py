"""The findings about a step, as a record: guards read it, not the names of metrics."""

from dataclasses import dataclass

from verl_rc.algorithm.health.ranges import HealthHistory


@dataclass(frozen=True)
class Findings:
    """Numbers of rollout correction that guards read: from before the update, or, where the actor corrects,
    from the update itself."""

    next_gap_limit: float | None
    """Limit of the mean gap from now on, nats. None means not calibrated yet."""
    health: HealthHistory
    """The history of healthy ranges and causes, with the causes of this step."""
    k3_kl: float | None = None
    """Mismatch of rollout and train policy, nats per token. None if nothing was measured."""
    mean_gap: float | None = None
    """Mean ``|train - rollout log-prob|``, nats. None if nothing was measured, or it proves nothing."""
    gap_limit: float | None = None
    """Limit of ``mean_gap``, nats. None means that it has none."""
    has_cause: bool = False
    """Whether a cause of the gap is named."""
