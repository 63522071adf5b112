"""The progress of the supply, which a checkpoint holds, its totals in one step, and the metrics of both."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verl_rc.algorithm.health.run_limits import FailedGroups
from verl_rc.algorithm.supply.group_book import AdmissionRule, GroupBook, GroupTotals
from verl_rc.algorithm.supply.step_time import WaitTotals
from verl_rc.config.errors import ConfigError
from verl_rc.records.batches import RolloutBatch
from verl_rc.records.dataset import PromptRow, PromptStream
from verl_rc.records.groups import Group, pack, unpack
from verl_rc.records.parts import num_tokens
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.checkpoint import SupplyState


@dataclass
class SupplyProgress:
    """The groups of a run, and what else a resumed supply goes on from. Samples are mutable while they
    grow."""

    book: GroupBook[Group]
    failed: FailedGroups = field(default_factory=FailedGroups)
    drawn: deque[tuple[int, PromptRow]] = field(default_factory=deque)
    """Epoch and row of prompts that were drawn with others and not admitted yet."""
    filtered_since_batch: int = 0
    waits: WaitTotals = field(default_factory=WaitTotals)
    is_length_alert_sent: bool = False

    @classmethod
    def resumed(
        cls, rule: AdmissionRule, prompts: PromptStream, saved: SupplyState | None
    ) -> "SupplyProgress":
        """Return the progress of a ``saved`` supply, or that of a new run without one.

        Raises ``ConfigError`` when the data lack a prompt of the checkpoint.
        """
        if saved is None:
            return cls(GroupBook(rule))
        try:
            groups = unpack(saved.groups(), prompts.row)
            drawn = deque((epoch, prompts.row(index)) for epoch, index in saved.drawn)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        return cls(
            GroupBook(rule, saved.book, groups),
            saved.failed,
            drawn,
            saved.filtered_since_batch,
            saved.waits,
            saved.is_length_alert_sent,
        )

    def state(self) -> SupplyState:
        """The part that a checkpoint holds; groups as they are when it is written."""
        groups = self.book.open
        return SupplyState(
            self.book.state(),
            self.failed,
            tuple((epoch, row.row_index) for epoch, row in self.drawn),
            lambda: pack(list(groups.values())),
            self.filtered_since_batch,
            self.waits,
            self.is_length_alert_sent,
        )

    @property
    def length_ratio(self) -> float:
        """Mean tokens of a trained group over those of a sampled one, over the run so far."""
        trained = self.book.ended["trained"]
        waiting = [group for group in self.book.open.values() if group.is_whole]
        sampled = trained.plus(self.book.ended["stale"]).plus(GroupTotals.from_groups(waiting))
        return (trained.tokens / trained.groups) / (sampled.tokens / sampled.groups)


def ages_to_come(groups: Iterable[Group], trained: int, batch: int) -> list[int]:
    """Return how old each of these groups, in order, will be in its step, when ``trained`` steps are done."""
    return [trained + place // batch - group.version for place, group in enumerate(groups)]


@dataclass
class StepTotals:
    """Totals since the last step was closed."""

    ended_before: Mapping[str, GroupTotals]
    """Groups of the book that had ended then, by fate."""
    arrived: int = 0
    """Tokens that came from the engines."""
    accepted: int = 0
    """Groups that were accepted for a batch."""
    failed_attempt_tokens: int = 0
    """Tokens of groups that failed and are sampled once more."""
    environment_failures: int = 0
    """Attempts at a group in which an environment failed."""
    scores: list[float] = field(default_factory=list)
    """Mean scores of groups that were accepted or filtered."""
    longest_group: float = 0.0
    """Seconds from a group's submission until it was whole, the longest."""
    waited_for_oldest: float = 0.0
    """Seconds in which there were groups enough for a batch, and older ones were waited for."""

    def ended(self, book: GroupBook[Group]) -> dict[str, GroupTotals]:
        """Groups that have ended since then, by fate."""
        return {fate: totals.minus(self.ended_before[fate]) for fate, totals in book.ended.items()}

    def lead_metrics(self, ended: Mapping[str, GroupTotals]) -> dict[str, float]:
        """Groups that failed, tokens that were dropped, and the wait for older groups."""
        return {
            "async/failed_groups": float(ended["failed"].groups),
            "async/dropped_tokens": float(ended["stale"].tokens),
            "async/wait_for_oldest_s": self.waited_for_oldest,
        }

    def filter_metrics(
        self, ended: Mapping[str, GroupTotals], samples: int, *, in_draws: bool
    ) -> dict[str, float]:
        """Dynamic sampling with ``samples`` a group: the groups that were decided in the step. A surplus is
        left where prompts are drawn ``in_draws``."""
        filtered = ended["filtered"].groups
        decided = self.accepted + filtered
        metrics = {"training/filter_groups/evicted_samples": float(filtered * samples)}
        if in_draws:
            surplus = ended["surplus"].groups * samples
            metrics["training/filter_groups/discarded_surplus_samples"] = float(surplus)
        if decided:
            metrics["training/filter_groups/informative_ratio"] = self.accepted / decided
            metrics["training/filter_groups/sampled_score_mean"] = math.fsum(self.scores) / decided
        return metrics


def age_metrics(
    rollouts: Ragged[RolloutBatch], ages: Sequence[int], current: int, bound: int
) -> dict[str, float]:
    """Ages of the groups and of their tokens; the trainer's weights are version ``current``."""
    token_ages = current - rollouts.policy_versions[rollouts.response_mask].double()
    return {
        "async/group_age/max": float(max(ages)),
        "async/group_age/bound": float(bound),
        "async/token_age/mean": float(token_ages.mean()),
    }


def require_room(groups: Iterable[Group], limit: int, converses: bool) -> None:
    """Raise ``ConfigError`` when a response that is still sampled has no room for another token below
    ``limit`` tokens. One that an environment answers may be full and wait for its last reply."""
    running = (sample for group in groups for sample in group.samples if not sample.ended)
    longest = max((num_tokens(sample.response.parts) for sample in running), default=0)
    least = longest if converses else longest + 1
    if longest and limit < least:
        raise ConfigError(
            f"data.max_response_length must be at least {least} to resume here: the checkpoint holds a "
            f"response of {longest} tokens that is still sampled; got {limit}. Raise it until this response "
            "has ended, or start anew with trainer.resume_mode=disable."
        )


def require_samples(groups: Iterable[Group], count: int) -> None:
    """Raise ``ConfigError`` naming a group of the checkpoint without ``count`` samples."""
    wrong = next((group for group in groups if len(group.samples) != count), None)
    if wrong is not None:
        raise ConfigError(
            f"the groups that the checkpoint holds must have the {count} samples that "
            f"algorithm.adv_estimator reads, but group {wrong.number} was sampled ahead with "
            f"{len(wrong.samples)}: remax has a greedy one. Restore the estimator, or start anew with "
            "trainer.resume_mode=disable."
        )


def require_ages(ages: Sequence[int], groups: Sequence[Group], oldest: int) -> None:
    """Raise ``RuntimeError`` naming groups that are older than ``oldest`` steps, or from the future."""
    wrong = [(group.number, age) for group, age in zip(groups, ages, strict=True) if not 0 <= age <= oldest]
    if wrong:
        raise RuntimeError(
            f"what a step trains on must be 0 to {oldest} steps old, but {len(wrong)} groups are not; the "
            f"first (number, age): {wrong[:5]}."
        )
