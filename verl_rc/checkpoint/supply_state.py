"""What a checkpoint holds of the samples of an asynchronous run: where every group is, and the prompts of the next ones."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import ConfigDict

from verl_rc.ppo.admission import AdmissionState
from verl_rc.ppo.guards import FailedGroups
from verl_rc.ppo.running_ledger import LedgerState
from verl_rc.ppo.step_time import WaitTotals


@dataclass(frozen=True)
class LengthTotals:
    """Sampled tokens and groups, for their mean length."""

    tokens: int = 0
    groups: int = 0

    def add(self, tokens: int, groups: int) -> "LengthTotals":
        """Return the totals with further tokens and groups."""
        return LengthTotals(self.tokens + tokens, self.groups + groups)


@dataclass(frozen=True)
class SupplyState:
    """The supply after a step. A group that has not ended is sampled on when the run resumes."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    admission: AdmissionState
    ledger: LedgerState
    trained: LengthTotals = field(default_factory=LengthTotals)
    """Totals of the groups that were trained on."""
    dropped: LengthTotals = field(default_factory=LengthTotals)
    """Totals of the groups that were dropped for their age, as far as they were sampled."""
    failed: FailedGroups = field(default_factory=FailedGroups)
    drawn: tuple[tuple[int, int], ...] = ()
    """Epoch and row index of the prompts that were drawn and not admitted yet."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Open groups, packed (``data.groups.pack``): a file of its own holds them."""
    filtered_since_batch: int = 0
    """Groups that were filtered since the last batch was complete, for ``filter_groups.max_num_gen_batches``."""
    waits: WaitTotals = field(default_factory=WaitTotals)
    """Seconds for the advice at the end of the run."""
    is_length_alert_sent: bool = False
    """Whether an alert said that lengths trained on are not those sampled; it is sent once in a run."""

    @property
    def num_groups(self) -> int:
        """Open groups."""
        return len(self.groups.get("groups", ()))
