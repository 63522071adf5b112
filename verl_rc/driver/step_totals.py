"""What happened to the groups of an asynchronous run in one step, and what the step reports of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from verl_rc.data.batches import RolloutBatch
from verl_rc.data.groups import Group


@dataclass
class StepTotals:
    """What happened since the last step was closed."""

    arrived: int = 0
    """Tokens that came from the engines."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of groups that left the run untrained, by fate."""
    groups: Counter[str] = field(default_factory=Counter)
    """Groups that were decided, by fate."""
    score: float = 0.0
    """Sum of the mean scores of groups that were kept or filtered."""
    longest_group: float = 0.0
    """Seconds from a group's submission until it was whole, the longest."""
    waited_for_oldest: float = 0.0
    """Seconds in which there were groups enough for a batch, and older ones were waited for."""

    def metrics(self) -> dict[str, float]:
        """Groups that failed, tokens that were dropped, and the wait for older groups."""
        return {
            "async/failed_groups": float(self.groups["failed"]),
            "async/dropped_tokens": float(self.tokens["stale"]),
            "async/wait_for_oldest_s": self.waited_for_oldest,
        }

    def filter_metrics(self, samples: int) -> dict[str, float]:
        """Dynamic sampling with ``samples`` a group: the groups that were decided in the step."""
        kept, filtered = self.groups["kept"], self.groups["filtered"]
        metrics = {"training/filter_groups/evicted_samples": float(filtered * samples)}
        if kept + filtered:
            metrics["training/filter_groups/informative_ratio"] = kept / (kept + filtered)
            metrics["training/filter_groups/sampled_score_mean"] = self.score / (kept + filtered)
        return metrics


def age_metrics(
    rollouts: RolloutBatch, ages: Sequence[int], current: int, bound: int, limit: int | None
) -> dict[str, float]:
    """Ages of the groups and of their tokens, with the share above ``limit``; the trainer's weights are version ``current``."""
    token_ages = current - rollouts.policy_versions[rollouts.response_mask].double()
    too_old = {} if limit is None else {"async/too_old_fraction": float((token_ages > limit).double().mean())}
    return {
        "async/group_age/max": float(max(ages)),
        "async/group_age/bound": float(bound),
        "async/token_age/mean": float(token_ages.mean()),
        **too_old,
    }


def require_ages(ages: Sequence[int], groups: Sequence[Group], oldest: int) -> None:
    """Raise ``RuntimeError`` naming groups that are older than ``oldest`` steps, or from the future."""
    wrong = [(group.number, age) for group, age in zip(groups, ages, strict=True) if not 0 <= age <= oldest]
    if wrong:
        raise RuntimeError(
            f"what a step trains on must be 0 to {oldest} steps old, but {len(wrong)} groups are not; the first (number, age): "
            f"{wrong[:5]}."
        )
