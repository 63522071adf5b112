"""A step closes when every sampled token has exactly one account, and says so when one is lost or counted
twice."""

import math

import pytest

from verl_rc.algorithm.supply.ledger import Ledger, LedgerError, accounts_of_update
from verl_rc.records.optimizer_step import OptimizerStep


def balanced() -> Ledger:
    ledger = Ledger()
    ledger.add_sampled(tokens=60, prompts=4)
    ledger.add_sampled(tokens=40, prompts=2)
    ledger.book({"filtered": 20, "surplus": 10})
    ledger.book({"rejected": 5})
    ledger.book({"trained": 50, "nonfinite": 15, "rejected": 0})
    ledger.book_prompts({"in_batch": 3, "filtered": 2, "surplus": 1})
    return ledger


@pytest.mark.parametrize("change", [-1, 1])
def test_a_token_lost_or_booked_twice_does_not_close(change: int) -> None:
    ledger = balanced()
    ledger.add_sampled(tokens=2)
    ledger.book({"trained": 2 + change})
    with pytest.raises(
        LedgerError, match=rf"every one of the step's 102 sampled tokens .* but {102 + change} are"
    ):
        ledger.balanced_metrics()


def test_a_lost_prompt_does_not_close() -> None:
    ledger = balanced()
    ledger.add_sampled(tokens=0, prompts=1)
    with pytest.raises(LedgerError, match="the step's 7 sampled prompts"):
        ledger.balanced_metrics()


def test_a_record_without_rollouts_has_no_books() -> None:
    assert Ledger().balanced_metrics() == {}


@pytest.mark.parametrize("entries", [{"eaten": 1}, {"trained": -1}])
def test_only_known_accounts_and_counts(entries: dict[str, int]) -> None:
    with pytest.raises(LedgerError, match="must be booked as numbers >= 0"):
        Ledger().book(entries)


def steps(*grad_norms: float) -> list[OptimizerStep]:
    return [OptimizerStep(norm) for norm in grad_norms]


def test_fates_follow_gradient_norms_of_mini_batches_that_kept_something() -> None:
    booked = accounts_of_update([10, 20, 30, 40], [10, 0, 25, 40], steps(1.0, math.nan, 3.0), epochs=1)
    assert booked == {"trained": 10 + 40, "rejected": 20 + 5, "nonfinite": 25, "overflow": 0}


def test_an_overflow_is_no_fault_until_its_scale_is_one() -> None:
    taken = [OptimizerStep(1.0, 4.0), OptimizerStep(math.inf, 2.0), OptimizerStep(math.nan, 1.0)]
    assert accounts_of_update([10, 20, 30], [10, 20, 30], taken, epochs=1) == {
        "trained": 10,
        "rejected": 0,
        "overflow": 20,
        "nonfinite": 30,
    }


def test_later_epochs_book_nothing() -> None:
    taken = steps(1.0, 1.0, math.inf, 1.0)
    assert accounts_of_update([10, 20] * 3, [10, 15, 9, 20, 0, 0], taken, epochs=3) == {
        "trained": 25,
        "rejected": 5,
        "nonfinite": 0,
        "overflow": 0,
    }


@pytest.mark.parametrize(
    ("planned", "kept", "norms"),
    [([1, 2], [1], [1.0]), ([1, 2], [1, 2], [1.0]), ([1, 2], [0, 2], [1.0, 1.0])],
)
def test_counts_that_do_not_belong_together(planned: list[int], kept: list[int], norms: list[float]) -> None:
    with pytest.raises(LedgerError, match="1 epochs of 2 mini-batches"):
        accounts_of_update(planned, kept, steps(*norms), epochs=1)


def test_a_batch_must_hold_every_token_without_an_account() -> None:
    ledger = Ledger()
    ledger.add_sampled(tokens=60)
    ledger.book({"filtered": 20})
    ledger.require_in_batch(40)
    for wrong in (39, 41, 60):
        with pytest.raises(LedgerError, match=rf"must hold the 40 sampled tokens .* it holds {wrong}\."):
            ledger.require_in_batch(wrong)
