"""The books of a run: every number has exactly one fate or is in flight, every token one account or is in the
balance."""

import pytest
from pydantic import TypeAdapter

from verl_rc.metrics.catalog.samples import ACCOUNTING
from verl_rc.ppo.admission import PlainRanges
from verl_rc.ppo.ledger import (
    RUN_TOKEN_ACCOUNTS,
    TOKEN_ACCOUNTS,
    LedgerError,
    LedgerState,
    RunningLedger,
)


def after_a_step() -> RunningLedger:
    """Six groups of 10 tokens each: two trained, one filtered, one dropped, two open, one of which has only 4
    tokens so far."""
    ledger = RunningLedger().admit(6).end("trained", [0, 3]).end("filtered", [1]).end("stale", [2])
    accounts = {"trained": 15, "rejected": 5, "filtered": 10, "stale": 10}
    return ledger.close_step(54, accounts, {4: 10, 5: 4})


def test_a_step_balances_with_what_is_open() -> None:
    ledger = after_a_step()
    assert (ledger.balance, ledger.in_flight.ranges) == (14, ((4, 6),))
    assert {fate: len(numbers) for fate, numbers in ledger.ended.items()} == {
        "trained": 2,
        "filtered": 1,
        "stale": 1,
    }
    following = ledger.admit(1).end("trained", [4, 5]).close_step(16, {"trained": 20}, {6: 10})
    assert following.balance == 10
    done = following.end("failed", [6]).close_step(0, {"failed": 10}, {})
    done.close_run()
    assert sum(map(len, done.ended.values())) == done.admitted == 7


@pytest.mark.parametrize(
    ("sampled", "accounts", "open_tokens"),
    [
        (17, {"trained": 20}, {6: 10}),  # a token lost
        (15, {"trained": 20}, {6: 10}),  # a token from nowhere
        (16, {"trained": 21}, {6: 10}),  # one counted twice
        (16, {"trained": 20}, {6: 9}),  # one lost on the way to the next step
    ],
)
def test_tokens_that_do_not_balance(
    sampled: int, accounts: dict[str, int], open_tokens: dict[int, int]
) -> None:
    ledger = after_a_step().admit(1).end("trained", [4, 5])
    with pytest.raises(LedgerError, match="opening balance 14"):
        ledger.close_step(sampled, accounts, open_tokens)


@pytest.mark.parametrize("accounts", [{"trained": 21, "stale": -1}, {"trained": 10, "eaten": 10}])
def test_accounts_that_do_not_exist_or_are_negative(accounts: dict[str, int]) -> None:
    ledger = after_a_step().admit(1).end("trained", [4, 5])
    with pytest.raises(LedgerError, match="tokens must be booked as numbers >= 0"):
        ledger.close_step(16, accounts, {6: 10})


@pytest.mark.parametrize("open_groups", [[4], [4, 5, 6], [0, 4, 5]])
def test_a_group_that_was_lost_or_is_open_though_it_ended(open_groups: list[int]) -> None:
    with pytest.raises(LedgerError, match="each of 6 admitted groups must be trained on"):
        after_a_step().close_step(0, {}, dict.fromkeys(open_groups, 0))


@pytest.mark.parametrize(
    ("fate", "numbers"), [("trained", [0]), ("trained", [6]), ("stale", [4, 4]), ("eaten", [4])]
)
def test_a_group_ends_once_and_in_a_known_way(fate: str, numbers: list[int]) -> None:
    with pytest.raises(LedgerError, match="groups in flight, each once, must get one of the fates"):
        after_a_step().end(fate, numbers)


def test_a_run_that_is_done_has_nothing_in_flight() -> None:
    with pytest.raises(LedgerError, match="2 groups with 14 tokens"):
        after_a_step().close_run()


def test_a_checkpoint_holds_all_of_it() -> None:
    ledger = after_a_step()
    states = TypeAdapter(LedgerState)
    assert RunningLedger.from_state(states.validate_json(states.dump_json(ledger.state()))) == ledger


@pytest.mark.parametrize(
    "ended", [{"trained": ((0, 2),), "stale": ((1, 2),)}, {"trained": ((5, 7),)}, {"eaten": ((0, 1),)}]
)
def test_a_checkpoint_that_contradicts_itself_is_refused(ended: dict[str, PlainRanges]) -> None:
    with pytest.raises(LedgerError, match="every number below 6 must have at most one of the fates"):
        RunningLedger.from_state(LedgerState(6, ended, 0))


def test_accounts_of_a_step_are_accounts_of_the_run() -> None:
    assert set(TOKEN_ACCOUNTS) < set(RUN_TOKEN_ACCOUNTS)
    known = {spec.name for spec in ACCOUNTING}
    assert {f"ledger/{account}_tokens" for account in TOKEN_ACCOUNTS} <= known
