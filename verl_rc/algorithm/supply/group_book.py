"""THE BOOK of groups: every group of a run is open, or has ended in exactly one way, and so have its tokens.

A group is a prompt with its samples; its number is its place in the order of admission over the whole life of
a run. The rule of admission:

    may be admitted:  numbers < (published + M (1 + k)) B + replaced

However engines work, a group that is trained in the order of admission is then at most ⌈M (1 + k)⌉ − 1 steps
old. Where groups stay open from step to step, a step alone cannot balance: it trains on tokens that were
sampled before it. So for each step

    opening balance + sampled = sum of all accounts + tokens of the open groups
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from verl_rc.algorithm.supply.ledger import LedgerError, check_accounts
from verl_rc.metrics.splits import TOKEN_ACCOUNTS

Fate = Literal["trained", "filtered", "failed", "stale", "surplus", "rejected"]
FATES: Mapping[Fate, str] = {
    "trained": "that a step took into its batch",
    "filtered": "whose samples tell nothing (algorithm.filter_groups)",
    "failed": "with a sample that failed in every attempt (tool, environment, reward or timeout)",
    "stale": "that grew older than the hard bound and were dropped",
    "surplus": "beyond data.train_batch_size after filtering",
    "rejected": "of which rollout correction keeps no token (algorithm.max_refills)",
}
"""Every way in which a group ends."""
_ACCEPTED: Mapping[Fate, tuple[bool, ...]] = {
    "trained": (True,),
    "filtered": (False,),
    "failed": (False,),
    "stale": (True, False),
    "surplus": (True, False),
    "rejected": (True,),
}
"""Whether a group that ends so was accepted before."""
RUN_TOKEN_ACCOUNTS = {
    **TOKEN_ACCOUNTS,
    "failed": "of attempts that failed, of groups that were sampled once more or replaced",
    "stale": "of groups that were dropped for their age",
}
"""Every account of tokens of an asynchronous run: those of a step, and those of groups that leave a run
between two."""


class BookedGroup(Protocol):
    """The part of a group that the book and the replay rule read."""

    @property
    def number(self) -> int:
        """Place in the order of admission."""

    @property
    def version(self) -> int:
        """Oldest weights that sampled any of its tokens; until it is whole, those of its admission."""

    @property
    def is_accepted(self) -> bool:
        """Whether the group is whole, scored and to be trained on."""

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled so far."""


G = TypeVar("G", bound=BookedGroup)


class AdmissionError(RuntimeError):
    """A group was admitted beyond the bound, or changed or ended when it was not open."""


@dataclass(frozen=True)
class AdmissionRule:
    """The bound on how far generation may be ahead of training."""

    batch: int
    """B: groups that a step trains on."""
    places: int
    """M (1 + k) B (``AsyncTrainingConfig.groups_in_memory``): groups that may be in flight or wait at
    once."""
    total: int | None = None
    """Groups that the run trains on in all, after which none is admitted. None means no limit."""
    draw: int | None = None
    """A synchronous run with dynamic sampling admits this many groups at once, and as many again when all are
    decided and fewer than B are accepted. None if groups are admitted one by one, as places get free."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a rule that admits nothing."""
        if self.batch < 1 or self.places < 1:
            raise ValueError(f"batch and places must be >= 1, got {self.batch} and {self.places}.")


@dataclass(frozen=True)
class GroupTotals:
    """Groups and their sampled tokens."""

    groups: int = 0
    tokens: int = 0

    def plus(self, other: "GroupTotals") -> "GroupTotals":
        """Return the sum of both."""
        return GroupTotals(self.groups + other.groups, self.tokens + other.tokens)

    def minus(self, other: "GroupTotals") -> "GroupTotals":
        """Return the difference of both."""
        return GroupTotals(self.groups - other.groups, self.tokens - other.tokens)

    @classmethod
    def from_groups(cls, groups: Sequence[BookedGroup]) -> "GroupTotals":
        """Return the totals of ``groups``."""
        return cls(len(groups), sum(group.num_sampled for group in groups))


@dataclass(frozen=True)
class BookState:
    """The book for a checkpoint, without the open groups."""

    published: int = 0
    admitted: int = 0
    ended: dict[str, GroupTotals] = field(default_factory=dict)
    balance: int = 0


class GroupBook(Generic[G]):
    """The groups of a run by number, and the totals of those that have ended."""

    def __init__(self, rule: AdmissionRule, state: BookState = BookState(), groups: Sequence[G] = ()) -> None:
        """Go on from ``state`` with its open ``groups``; ``rule`` may be another one than before.

        Raises ``ValueError`` when the state and its groups contradict each other.
        """
        self.rule = rule
        self.published = state.published
        """Version that the engines hold: training steps done when it was published."""
        self.admitted = state.admitted
        """Numbers 0, 1, …, ``admitted`` - 1 were handed out."""
        self.open: dict[int, G] = {group.number: group for group in groups}
        """Open groups by number, in the order of admission."""
        self.ended: dict[str, GroupTotals] = dict.fromkeys(FATES, GroupTotals()) | state.ended
        """Totals of the groups that have ended, by fate."""
        self.balance = state.balance
        """Sampled tokens of the groups that were open when the last step was closed."""
        numbers = [group.number for group in groups]
        is_known = all(0 <= number < self.admitted for number in numbers) and not set(self.ended) - set(FATES)
        if (
            not is_known
            or numbers != sorted(set(numbers))
            or self.admitted != len(self.open) + self._num_ended()
        ):
            raise ValueError(
                f"each of {self.admitted} admitted groups must be open or have one of the fates "
                f"{', '.join(FATES)}, got {len(groups)} open ones, the first {numbers[:5]}, and {self.ended}."
            )

    def state(self) -> BookState:
        """Return the part for a checkpoint that the open groups do not hold."""
        return BookState(self.published, self.admitted, dict(self.ended), self.balance)

    @property
    def replaced(self) -> int:
        """Groups that ended untrained; each has freed one place."""
        return self._num_ended() - self.ended["trained"].groups

    @property
    def num_accepted(self) -> int:
        """Groups that wait to be trained on."""
        return sum(group.is_accepted for group in self.open.values())

    @property
    def num_decided(self) -> int:
        """Groups that are accepted or have ended."""
        return self.num_accepted + self._num_ended()

    def allowance(self) -> int:
        """Number of groups that may be admitted now; 0 when a resumed run has more in flight than its rule
        would admit."""
        rule = self.rule
        limit = self.published * rule.batch + rule.places
        if rule.total is not None:
            limit = min(limit, rule.total)
        free = max(0, limit + self.replaced - self.admitted)
        if rule.draw is None or not free:
            return free
        return rule.draw if self.num_decided == self.admitted else 0

    def admit(self, groups: Sequence[G]) -> None:
        """Add the next groups. Raises ``AdmissionError`` beyond the allowance, or for another number than the
        next one."""
        numbers = [group.number for group in groups]
        if len(groups) > self.allowance() or numbers != [*range(self.admitted, self.admitted + len(groups))]:
            raise AdmissionError(
                f"at most {self.allowance()} groups may be admitted at version {self.published} with "
                f"{self.admitted} admitted and {self.replaced} replaced, in the order of their numbers; got "
                f"{len(groups)} from number {numbers[:1]}."
            )
        self.admitted += len(groups)
        self.open |= {group.number: group for group in groups}

    def update(self, group: G) -> None:
        """Replace an open group that is not accepted yet: it opened, failed once, was submitted or is
        accepted now. Raises ``AdmissionError`` unless it is such a group."""
        known = self.open.get(group.number)
        if known is None or known.is_accepted:
            raise AdmissionError(
                f"a group is decided once, after its admission: {group.number} is not open, or was decided "
                f"before; {self.admitted} are admitted."
            )
        self.open[group.number] = group

    def end(self, fate: Fate, numbers: Iterable[int]) -> list[G]:
        """Remove groups that leave the run, and return them.

        Raises ``AdmissionError`` for a number that is not open, or was accepted and may not end so, or the
        other way round.
        """
        numbers = list(numbers)
        wrong = [
            number
            for number in numbers
            if number not in self.open or self.open[number].is_accepted not in _ACCEPTED[fate]
        ]
        if wrong or len(set(numbers)) != len(numbers):
            raise AdmissionError(
                f"open groups, each once, may end as {fate!r} where "
                f"{' or '.join('accepted' if one else 'undecided' for one in _ACCEPTED[fate])}, but "
                f"{wrong[:5]} of {numbers[:5]} are not or come twice."
            )
        groups = [self.open.pop(number) for number in numbers]
        self.ended[fate] = self.ended[fate].plus(GroupTotals.from_groups(groups))
        return groups

    def publish(self, version: int) -> None:
        """Note that the engines hold ``version`` now. Raises ``AdmissionError`` when that is an older one."""
        if version < self.published:
            raise AdmissionError(f"versions only grow: {version} was published after {self.published}.")
        self.published = version

    def close_step(self, sampled: int, accounts: Mapping[str, int]) -> None:
        """Close the books of a step: ``sampled`` tokens came from the engines, ``accounts`` have the tokens
        that were used or left out.

        Raises ``LedgerError`` when a group or a token is unaccounted for.
        """
        if self.admitted != len(self.open) + self._num_ended():
            raise LedgerError(
                f"each of {self.admitted} admitted groups must be open or have ended, exactly once, but "
                f"{len(self.open)} are open and {self.ended} have ended."
            )
        check_accounts(accounts, RUN_TOKEN_ACCOUNTS)
        closing = sum(group.num_sampled for group in self.open.values())
        difference = self.balance + sampled - sum(accounts.values()) - closing
        if difference:
            raise LedgerError(
                f"opening balance {self.balance} + sampled {sampled} must equal the accounts "
                f"{dict(accounts)} + closing balance {closing}, all of them tokens: the difference is "
                f"{difference}."
            )
        self.balance = closing

    def close_run(self) -> None:
        """Raise ``LedgerError`` when a run that is done left a group open."""
        if self.open or self.balance:
            raise LedgerError(
                f"a run that is done must have nothing in flight, but {len(self.open)} groups with "
                f"{self.balance} tokens are: {list(self.open)[:5]}."
            )

    def _num_ended(self) -> int:
        return sum(totals.groups for totals in self.ended.values())
