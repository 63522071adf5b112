"""The progress of the supply, which a checkpoint holds, its totals in one step, and the metrics of both."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from verl_rc.checkpoint import LengthTotals, SupplyState
from verl_rc.config.errors import ConfigError
from verl_rc.data.batches import RolloutBatch
from verl_rc.data.dataset import PromptRow, PromptStream
from verl_rc.data.groups import Group, pack, unpack
from verl_rc.data.parts import num_tokens
from verl_rc.health.guards import FailedGroups
from verl_rc.ppo.admission import Admission
from verl_rc.ppo.ledger import RunningLedger
from verl_rc.ppo.step_time import WaitTotals


@dataclass
class SupplyProgress:
    """The groups of a run and what became of earlier ones. Groups are mutable while they are sampled."""

    admission: Admission
    ledger: RunningLedger
    trained: LengthTotals = field(default_factory=LengthTotals)
    dropped: LengthTotals = field(default_factory=LengthTotals)
    failed: FailedGroups = field(default_factory=FailedGroups)
    drawn: deque[tuple[int, PromptRow]] = field(default_factory=deque)
    """Epoch and row of prompts that were drawn with others and not admitted yet."""
    groups: dict[int, Group] = field(default_factory=dict)
    """Open groups by number, ascending."""
    filtered_since_batch: int = 0
    waits: WaitTotals = field(default_factory=WaitTotals)
    is_length_alert_sent: bool = False

    @classmethod
    def resumed(
        cls, admission: Admission, prompts: PromptStream, saved: SupplyState | None
    ) -> "SupplyProgress":
        """Return the progress of a ``saved`` supply, or that of a new run (None).

        Raises ``ConfigError`` when the data lack a prompt of the checkpoint.
        """
        if saved is None:
            return cls(admission, RunningLedger())
        try:
            groups = {group.number: group for group in unpack(saved.groups, prompts.row)}
            drawn = deque((epoch, prompts.row(index)) for epoch, index in saved.drawn)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        ledger = RunningLedger.from_state(saved.ledger)
        return cls(
            admission.resumed(saved.admission),
            ledger,
            saved.trained,
            saved.dropped,
            saved.failed,
            drawn,
            groups,
            saved.filtered_since_batch,
            saved.waits,
            saved.is_length_alert_sent,
        )

    def state(self) -> SupplyState:
        """The part that a checkpoint holds."""
        return SupplyState(
            self.admission.state(),
            self.ledger.state(),
            self.trained,
            self.dropped,
            self.failed,
            tuple((epoch, row.row_index) for epoch, row in self.drawn),
            pack(list(self.groups.values())),
            self.filtered_since_batch,
            self.waits,
            self.is_length_alert_sent,
        )

    @property
    def num_kept(self) -> int:
        """Groups that wait to be trained on."""
        return sum(group.fate == "kept" for group in self.groups.values())

    @property
    def length_ratio(self) -> float:
        """Mean tokens of a trained group over those of a sampled one, over the run so far."""
        waiting = [group.num_sampled for group in self.groups.values() if group.is_whole]
        sampled = LengthTotals(
            self.trained.tokens + self.dropped.tokens, self.trained.groups + self.dropped.groups
        )
        sampled = sampled.add(sum(waiting), len(waiting))
        return (self.trained.tokens / self.trained.groups) / (sampled.tokens / sampled.groups)

    def open_metrics(self) -> dict[str, float]:
        """Metrics of the groups that are open when a step ends."""
        whole = sum(group.is_whole for group in self.groups.values())
        return {
            "async/in_flight_groups": float(len(self.groups) - whole),
            "async/whole_waiting_groups": float(whole),
            "async/length_ratio": self.length_ratio,
        }


def ages_to_come(groups: Iterable[Group], trained: int, batch: int) -> list[int]:
    """Return how old each of these groups, in order, will be in its step, when ``trained`` steps are done."""
    return [trained + place // batch - group.version for place, group in enumerate(groups)]


@dataclass
class StepTotals:
    """Totals since the last step was closed."""

    arrived: int = 0
    """Tokens that came from the engines."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Tokens of groups that left the run untrained, by fate."""
    groups: Counter[str] = field(default_factory=Counter)
    """Groups that were decided, by fate."""
    environment_failures: int = 0
    """Attempts at a group in which an environment failed."""
    scores: list[float] = field(default_factory=list)
    """Mean scores of groups that were kept or filtered."""
    longest_group: float = 0.0
    """Seconds from a group's submission until it was whole, the longest."""
    draws: int = 0
    """Times that groups were admitted."""
    waited_for_oldest: float = 0.0
    """Seconds in which there were groups enough for a batch, and older ones were waited for."""

    def metrics(self) -> dict[str, float]:
        """Groups that failed, tokens that were dropped, and the wait for older groups."""
        return {
            "async/failed_groups": float(self.groups["failed"]),
            "async/dropped_tokens": float(self.tokens["stale"]),
            "async/wait_for_oldest_s": self.waited_for_oldest,
        }

    def filter_metrics(self, samples: int, *, in_draws: bool) -> dict[str, float]:
        """Dynamic sampling with ``samples`` a group: the groups that were decided in the step, and how many
        draws that took where they come ``in_draws``."""
        kept, filtered = self.groups["kept"], self.groups["filtered"]
        metrics = {"training/filter_groups/evicted_samples": float(filtered * samples)}
        if in_draws:
            surplus = self.groups["surplus"] * samples
            metrics["training/filter_groups/gen_batches"] = float(self.draws)
            metrics["training/filter_groups/discarded_surplus_samples"] = float(surplus)
        if kept + filtered:
            metrics["training/filter_groups/informative_ratio"] = kept / (kept + filtered)
            metrics["training/filter_groups/sampled_score_mean"] = math.fsum(self.scores) / (kept + filtered)
        return metrics


def age_metrics(
    rollouts: RolloutBatch, ages: Sequence[int], current: int, bound: int, limit: int | None
) -> dict[str, float]:
    """Ages of the groups and of their tokens, with the share above ``limit``; the trainer's weights are
    version ``current``."""
    token_ages = current - rollouts.policy_versions[rollouts.response_mask].double()
    too_old = {} if limit is None else {"async/too_old_fraction": float((token_ages > limit).double().mean())}
    return {
        "async/group_age/max": float(max(ages)),
        "async/group_age/bound": float(bound),
        "async/token_age/mean": float(token_ages.mean()),
        **too_old,
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
