"""The books of one step: every token sampled for training is in exactly one account."""

from collections import Counter
from collections.abc import Mapping, Sequence

from verl_rc.metrics.splits import PROMPT_ACCOUNTS, TOKEN_ACCOUNTS
from verl_rc.records.optimizer_step import OptimizerStep


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
        check_accounts(tokens, TOKEN_ACCOUNTS)
        self._tokens.update(tokens)

    def book_prompts(self, prompts: Mapping[str, int]) -> None:
        """Prompts by account. Raises ``LedgerError`` for an unknown account or a negative number."""
        check_accounts(prompts, PROMPT_ACCOUNTS, "prompts")
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


def check_accounts(entries: Mapping[str, int], accounts: Mapping[str, str], unit: str = "tokens") -> None:
    """Raise ``LedgerError`` for an account that does not exist or a negative number."""
    invalid = {account: count for account, count in entries.items() if account not in accounts or count < 0}
    if invalid:
        raise LedgerError(f"{unit} must be booked as numbers >= 0 to {', '.join(accounts)}; got {invalid}.")
