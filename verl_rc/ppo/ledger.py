"""The books: every token sampled for training is in exactly one account, and every admitted group ends in
exactly one way.

``Ledger`` keeps the books of one step, ``RunningLedger`` those of a run. Where groups stay open from step to
step, a step alone cannot balance: it trains on tokens that were sampled before it. So for each step

    opening balance + sampled = sum of all accounts + closing balance

in tokens, where the closing balance is counted among the open groups, never inferred; and over the run every
number below ``admitted`` is exactly one of trained, filtered, failed, stale and in flight.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from verl_rc.data.optimizer_step import OptimizerStep
from verl_rc.ppo.admission import NumberRanges, PlainRanges

TOKEN_ACCOUNTS = {
    "trained": "in the loss of an optimizer step that was taken",
    "rejected": "left out by rollout correction",
    "nonfinite": "in an optimizer step that was left out because its gradient was not finite",
    "overflow": "in an optimizer step that was left out because the loss's scale was too large for float16",
    "withheld": "in a batch that the actor did not train on: critic warm-up, or an alert with the action "
    "skip",
    "filtered": "of prompts whose samples tell nothing (algorithm.filter_groups)",
    "surplus": "of prompts beyond data.train_batch_size after filtering",
    "baseline": "of greedy responses that serve as a baseline only (remax)",
}
"""Every account of tokens and what is booked to it."""
PROMPT_ACCOUNTS = {
    "in_batch": "that the step's batch consists of",
    "filtered": "whose samples tell nothing (algorithm.filter_groups)",
    "surplus": "beyond data.train_batch_size after filtering",
}
"""Every account of prompts."""


class LedgerError(RuntimeError):
    """Tokens or prompts of a step are unaccounted for, or were counted twice."""


class Ledger:
    """The accounts of one step: the tokens and prompts sampled for training, and their use.

    Only tokens that the policy sampled (no tool tokens) and that reached the driver count. Requests of a lost
    engine are issued again, and its tokens do not count.
    """

    def __init__(self) -> None:
        self._sampled: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._prompts: Counter[str] = Counter()

    def add_sampled(self, tokens: int, prompts: int = 0) -> None:
        """Add sampled tokens, and the prompts that they belong to."""
        self._sampled.update(tokens=tokens, prompts=prompts)

    def book(self, tokens: Mapping[str, int]) -> None:
        """Tokens by account. Raises ``LedgerError`` for an unknown account or a negative number."""
        _check_entries(tokens, TOKEN_ACCOUNTS, "tokens")
        self._tokens.update(tokens)

    def book_prompts(self, prompts: Mapping[str, int]) -> None:
        """Prompts by account. Raises ``LedgerError`` for an unknown account or a negative number."""
        _check_entries(prompts, PROMPT_ACCOUNTS, "prompts")
        self._prompts.update(prompts)

    @property
    def accounts(self) -> dict[str, int]:
        """Tokens booked so far, by account."""
        return dict(self._tokens)

    @property
    def trained_tokens(self) -> int:
        """Tokens in the loss of optimizer steps that were taken."""
        return self._tokens["trained"]

    def require_in_batch(self, tokens: int) -> None:
        """Raise ``LedgerError`` when the batch about to be trained on does not hold all tokens that have no
        account yet."""
        expected = self._sampled["tokens"] - self._tokens.total()
        if tokens != expected:
            raise LedgerError(
                f"the step's batch must hold the {expected} sampled tokens that have no account yet, it "
                f"holds {tokens}. Tokens were lost or used twice on the way to the update, or the response "
                "mask is shifted."
            )

    def balanced_metrics(self) -> dict[str, float]:
        """``ledger/*`` of the step; nothing when nothing was sampled. Raises ``LedgerError`` when the books
        do not balance."""
        for unit, booked in (("tokens", self._tokens), ("prompts", self._prompts)):
            if self._sampled[unit] != booked.total():
                raise LedgerError(
                    f"every one of the step's {self._sampled[unit]} sampled {unit} must be booked to exactly "
                    f"one account, but {booked.total()} are: {dict(booked)}. Some were lost or used twice "
                    "between engine and update."
                )
        if not self._sampled.total():
            return {}
        metrics = {f"ledger/{account}_tokens": float(self._tokens[account]) for account in TOKEN_ACCOUNTS}
        metrics |= {f"ledger/prompts_{account}": float(self._prompts[account]) for account in PROMPT_ACCOUNTS}
        return {
            "ledger/sampled_tokens": float(self._sampled["tokens"]),
            "ledger/prompts_sampled": float(self._sampled["prompts"]),
            **metrics,
        }


def accounts_of_update(
    planned_tokens: Sequence[int], loss_tokens: Sequence[int], steps: Sequence[OptimizerStep], epochs: int
) -> dict[str, int]:
    """The accounts of the tokens of an update: ``trained``, ``rejected`` (by the actor),
    ``nonfinite`` and ``overflow``.

    ``planned_tokens`` and ``loss_tokens`` are, for each mini-batch of all ``epochs``, the tokens that may
    enter its loss and those that did; ``steps`` are the optimizer steps that were not skipped. A token's
    account is that of its first epoch. Raises ``LedgerError`` when the counts do not belong together.
    """
    if (
        len(planned_tokens) != len(loss_tokens)
        or len(loss_tokens) % epochs
        or len(steps) != sum(num_loss_tokens > 0 for num_loss_tokens in loss_tokens)
    ):
        raise LedgerError(
            f"{epochs} epochs of {len(planned_tokens)} mini-batches in all must report as many counts of "
            f"kept tokens, and an optimizer step for every one that kept any; got {len(steps)} steps and the "
            f"counts {list(loss_tokens)}."
        )
    accounts = Counter({"trained": 0, "rejected": 0, "nonfinite": 0, "overflow": 0})
    remaining = iter(steps)
    first = len(loss_tokens) // epochs
    for num_planned, num_loss_tokens in zip(planned_tokens[:first], loss_tokens[:first], strict=True):
        accounts["rejected"] += num_planned - num_loss_tokens
        if num_loss_tokens:
            accounts[next(remaining).outcome] += num_loss_tokens
    return dict(accounts)


def _check_entries(entries: Mapping[str, int], accounts: Mapping[str, str], unit: str) -> None:
    invalid = {account: count for account, count in entries.items() if account not in accounts or count < 0}
    if invalid:
        raise LedgerError(f"{unit} must be booked as numbers >= 0 to {', '.join(accounts)}; got {invalid}.")


FATES = {
    "trained": "that a step took into its batch",
    "filtered": "whose samples tell nothing (algorithm.filter_groups)",
    "failed": "with a sample that failed in every attempt (tool, environment, reward or timeout)",
    "stale": "that grew older than the hard bound and were dropped",
    "surplus": "beyond data.train_batch_size after filtering",
}
"""Every way in which a group ends."""
RUN_TOKEN_ACCOUNTS = {
    **TOKEN_ACCOUNTS,
    "failed": "of attempts that failed, of groups that were sampled once more or replaced",
    "stale": "of groups that were dropped for their age",
}
"""Every account of tokens of an asynchronous run: those of a step, and those of groups that leave a run
between two."""


@dataclass(frozen=True)
class LedgerState:
    """The running ledger for a checkpoint."""

    admitted: int
    ended: dict[str, PlainRanges]
    balance: int


@dataclass(frozen=True)
class RunningLedger:
    """The fate of every group of the run. Immutable: every method returns the next value, which belongs in a
    checkpoint."""

    admitted: int = 0
    """Numbers 0, 1, …, ``admitted`` - 1 were handed out."""
    in_flight: NumberRanges = field(default_factory=NumberRanges)
    """Numbers without a fate: being sampled, or waiting to be trained on."""
    ended: Mapping[str, NumberRanges] = field(default_factory=dict)
    """Numbers by their fate."""
    balance: int = 0
    """Sampled tokens of the groups that were open when the last step was closed."""

    def admit(self, count: int) -> "RunningLedger":
        """Put the next ``count`` numbers in flight."""
        new = NumberRanges.from_numbers(range(self.admitted, self.admitted + count))
        return replace(self, admitted=self.admitted + count, in_flight=self.in_flight.union(new))

    def end(self, fate: str, numbers: Iterable[int]) -> "RunningLedger":
        """End groups that leave the run. Raises ``LedgerError`` for an unknown fate and for numbers that are
        not in flight."""
        ending = list(numbers)
        ranges = NumberRanges.from_numbers(ending)
        remaining = set(self.in_flight) - set(ending)
        unknown = [number for number in ranges if number not in self.in_flight]
        if fate not in FATES or unknown or len(ranges) != len(ending):
            raise LedgerError(
                f"groups in flight, each once, must get one of the fates {', '.join(FATES)}; got {fate} for "
                f"{len(ending)} numbers, {len(ranges)} of them different; not in flight are {unknown[:5]}."
            )
        ended = {**self.ended, fate: self.ended.get(fate, NumberRanges()).union(ranges)}
        return replace(self, in_flight=NumberRanges.from_numbers(remaining), ended=ended)

    def close_step(
        self, sampled: int, accounts: Mapping[str, int], open_tokens: Mapping[int, int]
    ) -> "RunningLedger":
        """Close the books of a step: ``sampled`` tokens came from the engines, ``accounts`` say what became
        of tokens.

        ``open_tokens`` are the sampled tokens of every group that is open now, by number, as the driver holds
        them. Raises ``LedgerError`` when a group is in flight here and not there (or the other way round), or
        when tokens do not balance.
        """
        counted = len(self.in_flight) + sum(map(len, self.ended.values()))
        missing, surplus = set(self.in_flight) - set(open_tokens), set(open_tokens) - set(self.in_flight)
        if missing or surplus or counted != self.admitted:
            raise LedgerError(
                f"each of {self.admitted} admitted groups must be trained on, filtered, failed, stale or in "
                f"flight, exactly once, but {counted} are; {sorted(missing)[:5]} ({len(missing)}) were lost, "
                f"{sorted(surplus)[:5]} ({len(surplus)}) are open though they ended."
            )
        _check_entries(accounts, RUN_TOKEN_ACCOUNTS, "tokens")
        closing = sum(open_tokens.values())
        difference = self.balance + sampled - sum(accounts.values()) - closing
        if difference:
            raise LedgerError(
                f"opening balance {self.balance} + sampled {sampled} must equal the accounts "
                f"{dict(accounts)} + closing balance {closing}, all of them tokens: the difference is "
                f"{difference}."
            )
        return replace(self, balance=closing)

    def close_run(self) -> None:
        """Raise ``LedgerError`` when a run that is done left a group in flight."""
        if self.in_flight.ranges or self.balance:
            raise LedgerError(
                f"a run that is done must have nothing in flight, but {len(self.in_flight)} groups with "
                f"{self.balance} tokens are: {list(self.in_flight)[:5]}."
            )

    def state(self) -> LedgerState:
        """Return the ledger for a checkpoint."""
        return LedgerState(
            self.admitted, {fate: numbers.ranges for fate, numbers in self.ended.items()}, self.balance
        )

    @classmethod
    def from_state(cls, state: LedgerState) -> "RunningLedger":
        """The inverse of ``state``. Raises ``LedgerError`` when a number has two fates, or one that does not
        exist."""
        admitted = state.admitted
        ended = {fate: NumberRanges.from_plain(plain) for fate, plain in state.ended.items()}
        numbers_ended = NumberRanges.from_numbers(number for numbers in ended.values() for number in numbers)
        in_flight = numbers_ended.missing_below(admitted)
        if set(ended) - set(FATES) or len(in_flight) + sum(map(len, ended.values())) != admitted:
            raise LedgerError(
                f"every number below {admitted} must have at most one of the fates {', '.join(FATES)}, got "
                f"the counts { {fate: len(numbers) for fate, numbers in ended.items()} } with "
                f"{len(in_flight)} in flight."
            )
        return cls(admitted, in_flight, ended, state.balance)
