"""The book of groups: how far generation may be ahead, that a group ends once, that tokens balance, and that
a resumed run goes on with it.

That the ages of what is trained stay within the bound is shown in ``test_replay_order.py``, over all
interleavings.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import pytest
from pydantic import TypeAdapter

from verl_rc.algorithm.supply.group_book import (
    FATES,
    RUN_TOKEN_ACCOUNTS,
    AdmissionError,
    AdmissionRule,
    BookState,
    GroupBook,
    GroupTotals,
)
from verl_rc.algorithm.supply.ledger import LedgerError
from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.metrics.catalog import check_names
from verl_rc.metrics.splits import TOKEN_ACCOUNTS


@dataclass(frozen=True)
class Booked:
    number: int
    is_accepted: bool = False
    num_sampled: int = 0
    version: int = 0


Book = GroupBook[Booked]


def rule_of(batch: int, every: int = 1, bound: Fraction = Fraction(0), **fields: int) -> AdmissionRule:
    """A publication every so many steps, and so many of them ahead."""
    options = AsyncTrainingConfig(trigger_parameter_sync_step=every, staleness_threshold=float(bound))
    return AdmissionRule(batch, options.groups_in_memory(batch), **fields)


def admit(book: Book, count: int) -> None:
    book.admit([Booked(number) for number in range(book.admitted, book.admitted + count)])


def book_of(rule: AdmissionRule, count: int = 0) -> Book:
    book = Book(rule)
    admit(book, count)
    return book


def accept(book: Book, *numbers: int) -> None:
    for number in numbers:
        book.update(replace(book.open[number], is_accepted=True))


def from_disk(book: Book, rule: AdmissionRule | None = None) -> Book:
    states = TypeAdapter(BookState)
    return Book(
        rule or book.rule, states.validate_json(states.dump_json(book.state())), list(book.open.values())
    )


def undecided_in(book: Book) -> list[int]:
    return [number for number, group in book.open.items() if not group.is_accepted]


@pytest.mark.parametrize(
    ("every", "bound", "published", "limit"),
    [
        (1, Fraction(0), 0, 8),  # the synchronous run: one batch
        (1, Fraction(0), 5, 48),
        (1, Fraction(1), 0, 16),  # one step off
        (1, Fraction(3), 2, 48),
        (4, Fraction(0), 0, 32),  # streaming in the step
        (4, Fraction(1, 2), 4, 80),
        (1, Fraction(1, 16), 0, 9),  # numbers below 8.5
    ],
)
def test_numbers_below_the_limit_may_be_admitted(
    every: int, bound: Fraction, published: int, limit: int
) -> None:
    book = book_of(rule_of(batch=8, every=every, bound=bound))
    book.publish(published)
    assert book.allowance() == limit
    admit(book, limit)
    assert book.allowance() == 0
    with pytest.raises(AdmissionError, match="at most 0 groups may be admitted"):
        admit(book, 1)


def test_numbers_are_handed_out_in_order() -> None:
    with pytest.raises(AdmissionError, match="in the order of their numbers; got 1 from number"):
        book_of(rule_of(batch=8), 2).admit([Booked(3)])


def test_a_publication_admits_as_many_as_its_steps_train() -> None:
    book = book_of(rule_of(batch=8, every=2, bound=Fraction(1)), 32)
    book.publish(2)
    assert book.allowance() == 16


def test_a_replaced_group_frees_its_place_at_once_and_an_accepted_one_does_not() -> None:
    book = book_of(rule_of(batch=4), 4)
    accept(book, 0, 2)
    assert book.allowance() == 0
    book.end("filtered", [1])
    book.end("failed", [3])
    assert book.allowance() == 2
    book.end("stale", [0])
    assert book.allowance() == 3


def test_the_last_steps_admit_nothing_beyond_the_run() -> None:
    book = book_of(rule_of(batch=4, bound=Fraction(2), total=10), 10)
    book.publish(7)
    assert book.allowance() == 0
    book.end("filtered", [9])
    assert book.allowance() == 1


def test_a_draw_is_admitted_as_a_whole_once_the_last_one_is_decided() -> None:
    book = book_of(AdmissionRule(batch=4, places=4, draw=3), 3)
    accept(book, 0)
    book.end("filtered", [1])
    assert book.allowance() == 0  # number 2 is not decided
    accept(book, 2)
    assert book.allowance() == 3  # two are accepted, four are needed
    admit(book, 3)
    accept(book, 3, 4, 5)
    assert book.allowance() == 0


MOVES: Mapping[str, Callable[[Book], object]] = {
    "accepted twice": lambda book: accept(book, 1),
    "accepted before its admission": lambda book: book.update(Booked(4)),
    "accepted after its end": lambda book: book.update(Booked(2)),
    "filtered though accepted": lambda book: book.end("filtered", [1]),
    "failed though accepted": lambda book: book.end("failed", [1]),
    "trained though undecided": lambda book: book.end("trained", [3]),
    "ended twice": lambda book: book.end("failed", [2]),
    "ended before its admission": lambda book: book.end("stale", [4]),
    "twice in one call": lambda book: book.end("stale", [3, 3]),
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_a_group_is_decided_once_and_ends_once(move: Callable[[Book], object]) -> None:
    book = book_of(rule_of(batch=4), 4)
    accept(book, 1)
    book.end("filtered", [2])
    before = book.state(), dict(book.open)
    with pytest.raises(AdmissionError):
        move(book)
    assert (book.state(), book.open) == before


def test_versions_only_grow() -> None:
    book = book_of(rule_of(batch=1))
    book.publish(4)
    with pytest.raises(AdmissionError, match="3 was published after 4"):
        book.publish(3)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"places": 0}])
def test_a_rule_that_admits_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        AdmissionRule(**{"batch": 1, "places": 1, **wrong})


# tokens


def after_a_step() -> Book:
    """Six groups of 10 tokens each: two trained, one filtered, one dropped, two open, one of which has only 4
    tokens so far."""
    book = Book(AdmissionRule(batch=2, places=100))
    book.admit([Booked(number, num_sampled=4 if number == 5 else 10) for number in range(6)])
    accept(book, 0, 3)
    book.end("trained", [0, 3])
    book.end("filtered", [1])
    book.end("stale", [2])
    book.close_step(54, {"trained": 15, "rejected": 5, "filtered": 10, "stale": 10})
    return book


def test_a_step_balances_with_what_is_open() -> None:
    book = after_a_step()
    assert (book.balance, [*book.open], book.replaced) == (14, [4, 5], 2)
    ended = {fate: totals for fate, totals in book.ended.items() if totals.groups}
    assert ended == {
        "trained": GroupTotals(2, 20),
        "filtered": GroupTotals(1, 10),
        "stale": GroupTotals(1, 10),
    }
    book.admit([Booked(6, num_sampled=10)])
    book.update(Booked(5, num_sampled=10))
    accept(book, 4, 5)
    book.end("trained", [4, 5])
    book.close_step(16, {"trained": 20})
    assert book.balance == 10
    book.end("failed", [6])
    book.close_step(0, {"failed": 10})
    book.close_run()
    assert sum(totals.groups for totals in book.ended.values()) == book.admitted == 7


@pytest.mark.parametrize(
    ("sampled", "accounts", "open_tokens"),
    [
        (17, {"trained": 20}, 10),  # a token lost
        (15, {"trained": 20}, 10),  # a token from nowhere
        (16, {"trained": 21}, 10),  # one counted twice
        (16, {"trained": 20}, 9),  # one lost on the way to the next step
    ],
)
def test_tokens_that_do_not_balance(sampled: int, accounts: dict[str, int], open_tokens: int) -> None:
    book = after_a_step()
    book.admit([Booked(6, num_sampled=open_tokens)])
    accept(book, 4, 5)
    book.end("trained", [4, 5])
    with pytest.raises(LedgerError, match="opening balance 14"):
        book.close_step(sampled, accounts)


@pytest.mark.parametrize("accounts", [{"trained": 21, "stale": -1}, {"trained": 10, "eaten": 10}])
def test_accounts_that_do_not_exist_or_are_negative(accounts: dict[str, int]) -> None:
    with pytest.raises(LedgerError, match="tokens must be booked as numbers >= 0"):
        after_a_step().close_step(16, accounts)


def test_a_group_that_left_without_an_end() -> None:
    book = after_a_step()
    del book.open[4]
    with pytest.raises(LedgerError, match="each of 6 admitted groups must be open or have ended"):
        book.close_step(0, {})


def test_a_run_that_is_done_has_nothing_in_flight() -> None:
    with pytest.raises(LedgerError, match="2 groups with 14 tokens"):
        after_a_step().close_run()


def test_accounts_of_a_step_are_accounts_of_the_run() -> None:
    assert set(TOKEN_ACCOUNTS) < set(RUN_TOKEN_ACCOUNTS)
    check_names(f"ledger/{account}_tokens" for account in TOKEN_ACCOUNTS)


# resumed runs


def test_a_checkpoint_holds_all_of_it() -> None:
    """What was open before is open after it, and nothing that ended comes back."""
    book = after_a_step()
    after = from_disk(book)
    assert (after.state(), after.open) == (book.state(), book.open)
    for number in range(4):
        with pytest.raises(AdmissionError):
            after.update(Booked(number))


@pytest.mark.parametrize(
    ("state", "numbers"),
    [
        (BookState(admitted=3, ended={"trained": GroupTotals(2)}), [0, 1]),  # one too many
        (BookState(admitted=3, ended={"trained": GroupTotals(1)}), [2]),  # one lost
        (BookState(admitted=2), [1, 0]),
        (BookState(admitted=2), [1, 1]),
        (BookState(admitted=2), [1, 2]),
        (BookState(admitted=2, ended={"eaten": GroupTotals(1)}), [1]),
    ],
)
def test_a_checkpoint_that_contradicts_itself_is_refused(state: BookState, numbers: list[int]) -> None:
    with pytest.raises(ValueError, match="admitted groups must be open or have one of the fates"):
        Book(rule_of(batch=2), state, [Booked(number) for number in numbers])


def test_a_resumed_run_with_a_smaller_bound_admits_nothing_until_it_has_room() -> None:
    smaller = from_disk(book_of(rule_of(batch=2, bound=Fraction(3)), 8), rule_of(batch=2))
    allowances = []
    for version in range(6):
        smaller.publish(version)
        allowances.append(smaller.allowance())
    assert allowances == [0, 0, 0, 0, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_no_burst_after_a_resume(seed: int) -> None:
    """At every event of a random history with resumes, what is admitted is what one count of all events
    allows."""
    rng = random.Random(seed)
    every, bound, batch = rng.randint(1, 3), Fraction(rng.randint(0, 6), 2), rng.randint(1, 3)
    book = Book(rule_of(batch=batch, every=every, bound=bound))
    replaced, trained, undecided = 0, 0, list[int]()
    for _ in range(300):
        event = rng.choice(["admit", "accept", *FATES, "publish", "resume"])
        accepted = [number for number, group in book.open.items() if group.is_accepted]
        if event == "admit" and book.allowance():
            count = rng.randint(1, book.allowance())
            undecided += range(book.admitted, book.admitted + count)
            admit(book, count)
        elif event == "accept" and undecided:
            accept(book, undecided.pop(rng.randrange(len(undecided))))
        elif event in ("filtered", "failed") and undecided:
            book.end(event, [undecided.pop(rng.randrange(len(undecided)))])
            replaced += 1
        elif event in ("stale", "surplus") and accepted:
            book.end(event, [rng.choice(accepted)])
            replaced += 1
        elif event == "trained" and accepted:
            book.end(event, accepted[:1])
        elif event == "publish" and book.admitted - replaced >= (trained + every) * batch:
            trained += every
            book.publish(trained)
        elif event == "resume":
            book = from_disk(book)
        assert book.admitted < (trained + every * (1 + bound)) * batch + replaced + 1
        assert undecided_in(book) == sorted(undecided)
    assert book.admitted > 5


def test_ninety_percent_that_tell_nothing_do_not_starve_the_engines() -> None:
    """Every filtered group is replaced at once, so the run goes on with as many in flight as before. The
    book does not grow with it."""
    rng = random.Random(0)
    book = Book(rule_of(batch=4, bound=Fraction(1)))
    trained = 0
    while trained < 200:
        admit(book, book.allowance())
        assert len(book.open) == 8
        number = undecided_in(book)[0]
        if rng.random() < 0.9:
            book.end("filtered", [number])
        else:
            accept(book, number)
        if book.num_accepted == 4:
            book.end("trained", [number for number, group in book.open.items() if group.is_accepted])
            trained += 1
            book.publish(trained)
    assert book.replaced > 5000
    assert len(str(book.state())) < 400
