"""The books of a whole run: every admitted group ends in exactly one way, and every sampled token in one account.

Where groups stay open from step to step, a step alone cannot balance: what it trains on was sampled before. So for each step

    opening balance + sampled = sum of all accounts + closing balance

in tokens, where the closing balance is counted among the open groups, never inferred; and over the run every number below
``admitted`` is exactly one of trained, filtered, failed, stale and in flight. ``ppo.ledger`` keeps the book of one step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from verl_rc.ppo.ledger import TOKEN_ACCOUNTS, LedgerError
from verl_rc.ppo.number_ranges import NumberRanges, PlainRanges

FATES = {
    "trained": "that a step took into its batch",
    "filtered": "whose samples tell nothing (algorithm.filter_groups)",
    "failed": "with a sample that failed in every attempt (tool, environment, reward or timeout)",
    "stale": "that grew older than the hard bound and were dropped",
}
"""Every way in which a group ends."""
RUN_TOKEN_ACCOUNTS = {
    **TOKEN_ACCOUNTS,
    "failed": "of attempts that failed, of groups that were sampled once more or replaced",
    "stale": "of groups that were dropped for their age",
}
"""Every account of tokens of an asynchronous run: those of a step, and those of groups that leave a run between two."""


@dataclass(frozen=True)
class LedgerState:
    """The running ledger for a checkpoint."""

    admitted: int
    ended: dict[str, PlainRanges]
    balance: int


@dataclass(frozen=True)
class RunningLedger:
    """What became of every group of the run. A value: every move returns the next one, and belongs in a checkpoint."""

    admitted: int = 0
    """Numbers 0, 1, …, ``admitted`` - 1 were handed out."""
    in_flight: NumberRanges = field(default_factory=NumberRanges)
    """Numbers without a fate: being sampled, or waiting to be trained on."""
    ended: Mapping[str, NumberRanges] = field(default_factory=dict)
    """Numbers by their fate."""
    balance: int = 0
    """Sampled tokens of the groups that were open when the last step was closed."""

    def count(self, *fates: str) -> int:
        """Groups that ended in these ways."""
        return sum(len(self.ended[fate]) for fate in fates if fate in self.ended)

    def admit(self, count: int) -> "RunningLedger":
        """The next ``count`` numbers are in flight."""
        new = NumberRanges.from_numbers(range(self.admitted, self.admitted + count))
        return replace(self, admitted=self.admitted + count, in_flight=self.in_flight.union(new))

    def end(self, fate: str, numbers: Iterable[int]) -> "RunningLedger":
        """These leave the run. Raises ``LedgerError`` for an unknown fate and for numbers that are not in flight."""
        given = list(numbers)
        new, left = NumberRanges.from_numbers(given), set(self.in_flight) - set(given)
        wrong = [number for number in new if number not in self.in_flight]
        if fate not in FATES or wrong or len(new) != len(given):
            raise LedgerError(
                f"groups in flight, each once, must get one of the fates {', '.join(FATES)}; got {fate} for {len(given)} "
                f"numbers, {len(new)} of them different; not in flight are {wrong[:5]}."
            )
        ended = {**self.ended, fate: self.ended.get(fate, NumberRanges()).union(new)}
        return replace(self, in_flight=NumberRanges.from_numbers(left), ended=ended)

    def close_step(self, sampled: int, accounts: Mapping[str, int], open_tokens: Mapping[int, int]) -> "RunningLedger":
        """The books of a step: ``sampled`` tokens came from the engines, ``accounts`` say what became of tokens.

        ``open_tokens`` are the sampled tokens of every group that is open now, by number, as the driver holds them. Raises
        ``LedgerError`` when a group is in flight here and not there (or the other way round), or when tokens do not balance.
        """
        counted = len(self.in_flight) + self.count(*FATES)
        lost, surplus = set(self.in_flight) - set(open_tokens), set(open_tokens) - set(self.in_flight)
        if lost or surplus or counted != self.admitted:
            raise LedgerError(
                f"each of {self.admitted} admitted groups must be trained on, filtered, failed, stale or in flight, exactly "
                f"once, but {counted} are; {sorted(lost)[:5]} ({len(lost)}) were lost, {sorted(surplus)[:5]} ({len(surplus)}) "
                "are open though they ended."
            )
        unknown = {name: count for name, count in accounts.items() if name not in RUN_TOKEN_ACCOUNTS or count < 0}
        closing = sum(open_tokens.values())
        if unknown or self.balance + sampled != sum(accounts.values()) + closing:
            raise LedgerError(
                f"opening balance {self.balance} + sampled {sampled} must equal the accounts {dict(accounts)} + closing balance "
                f"{closing}, all of them tokens: the difference is {self.balance + sampled - sum(accounts.values()) - closing}."
            )
        return replace(self, balance=closing)

    def close_run(self) -> None:
        """Raise ``LedgerError`` when a run that is done left a group in flight."""
        if self.in_flight.ranges or self.balance:
            raise LedgerError(
                f"a run that is done has nothing in flight, but {len(self.in_flight)} groups with {self.balance} tokens are: "
                f"{list(self.in_flight)[:5]}."
            )

    def state(self) -> LedgerState:
        """Return the ledger for a checkpoint."""
        return LedgerState(self.admitted, {fate: numbers.plain() for fate, numbers in self.ended.items()}, self.balance)

    @classmethod
    def from_state(cls, state: LedgerState) -> "RunningLedger":
        """What ``state`` gave. Raises ``LedgerError`` when a number has two fates, or one that does not exist."""
        admitted = state.admitted
        ended = {fate: NumberRanges.from_plain(plain) for fate, plain in state.ended.items()}
        numbers_ended = NumberRanges.from_numbers(number for numbers in ended.values() for number in numbers)
        in_flight = numbers_ended.missing_below(admitted)
        if set(ended) - set(FATES) or len(in_flight) + sum(map(len, ended.values())) != admitted:
            raise LedgerError(
                f"every number below {admitted} must have at most one of the fates {', '.join(FATES)}, got the counts "
                f"{ {fate: len(numbers) for fate, numbers in ended.items()} } with {len(in_flight)} in flight."
            )
        return cls(admitted, in_flight, ended, state.balance)
