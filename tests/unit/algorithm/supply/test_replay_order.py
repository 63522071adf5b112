"""Which groups make a batch: small cases by hand, and all interleavings of small runs, in which no group may
grow too old."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from itertools import combinations_with_replacement, product
from typing import NamedTuple

import pytest

from verl_rc.algorithm.supply.group_book import AdmissionRule, BookState, GroupBook, GroupTotals
from verl_rc.algorithm.supply.replay_order import NextBatch, ReplayRule, next_batch


class OpenGroup(NamedTuple):
    number: int
    version: int
    is_accepted: bool
    num_sampled: int = 0


Decide = Callable[[Iterable[OpenGroup], int, ReplayRule], NextBatch]


def groups(*facts: tuple[int, int, bool]) -> list[OpenGroup]:
    return [OpenGroup(*one) for one in facts]


IN_ORDER = ReplayRule("admitted", batch=2, oldest=1)
READY = ReplayRule("ready", batch=2, oldest=2)


def test_in_order_of_admission_every_lower_number_is_decided_first() -> None:
    waiting = groups((7, 1, True), (4, 0, True), (5, 0, False), (6, 1, True))
    assert next_batch(waiting, 2, IN_ORDER) == NextBatch(awaited=(5,))
    assert next_batch([one for one in waiting if one.number != 5], 2, IN_ORDER).numbers == (
        4,
        6,
    )  # 5 was filtered
    assert next_batch(groups((4, 0, True)), 2, IN_ORDER) == NextBatch()


def test_in_order_of_completion_the_oldest_version_goes_first() -> None:
    waiting = groups((4, 0, False), (5, 1, True), (6, 0, True), (7, 1, True))
    assert next_batch(waiting, 2, READY).numbers == (6, 5)
    assert next_batch(waiting[:2], 2, READY) == NextBatch()


def test_a_group_that_could_not_be_trained_later_is_waited_for() -> None:
    """Step 3 is the last one that may train on version 0 (age 2): number 4 cannot be left behind."""
    waiting = groups((4, 0, False), (5, 1, True), (6, 1, True))
    assert next_batch(waiting, 3, READY) == NextBatch(awaited=(4,))
    assert next_batch(waiting, 2, READY).numbers == (5, 6)


def test_all_that_must_still_fit_count_and_not_the_oldest_alone() -> None:
    """After step 2 one step is left for version 0, in which two of the three fit."""
    waiting = groups((1, 0, False), (2, 0, False), (3, 0, False), (4, 1, True), (5, 1, True))
    assert next_batch(waiting, 2, READY) == NextBatch(awaited=(1, 2, 3))
    assert next_batch(waiting[1:], 2, READY).numbers == (4, 5)


def test_decided_groups_left_behind_count_too() -> None:
    """Step 3 is the last for version 0, and two of the decided ones and number 5 would be left for its two
    places."""
    waiting = groups((1, 0, True), (2, 0, True), (3, 0, True), (4, 0, True), (5, 0, False))
    assert next_batch(waiting, 2, READY) == NextBatch(awaited=(5,))
    assert next_batch(waiting[1:], 2, READY).numbers == (2, 3)


def test_what_is_too_old_is_dropped_where_that_was_asked_for() -> None:
    rule = ReplayRule("ready", batch=1, oldest=1, late="drop")
    waiting = groups((1, 0, False), (2, 0, True), (3, 2, True))
    assert next_batch(waiting, 3, rule) == NextBatch((3,), dropped=(1, 2))
    assert next_batch(waiting[:2], 3, rule) == NextBatch(dropped=(1, 2))
    assert next_batch(waiting, 2, rule).numbers == (2,)


def test_a_resumed_run_with_a_smaller_bound_trains_what_is_there_oldest_first() -> None:
    """Nothing is left to wait for, so it goes on."""
    rule = ReplayRule("ready", batch=1, oldest=0)
    waiting = groups((1, 0, True), (2, 0, True), (3, 0, False))
    assert next_batch(waiting, 3, rule) == NextBatch(awaited=(3,))
    assert next_batch(waiting[:2], 3, rule).numbers == (1,)


State = tuple[int, tuple[tuple[int, bool], ...]]
"""Steps since the last publication, and version (0: the published one) and decision of every open group."""


class Run:
    """A run in every state that any engines could bring it to; versions count from the last publication."""

    def __init__(
        self, order: str, every: int, ahead: Fraction, hard: int, batch: int, late: str = "wait"
    ) -> None:
        bound = ahead if order == "admitted" else hard
        self.rule = ReplayRule(order, batch, math.ceil(every * (1 + bound)) - 1, late)
        self.every = every
        self.admission = AdmissionRule(batch, math.ceil(every * (1 + ahead) * batch))

    def state(self, steps: int, known: Iterable[tuple[int, bool]]) -> State:
        """With all that may be admitted now. In order of completion, which of several like groups is which
        does not matter."""
        open_groups = list(known)
        trained = steps * self.rule.batch
        counts = BookState(0, trained + len(open_groups), {"trained": GroupTotals(trained)})
        numbered = [OpenGroup(trained + place, *one) for place, one in enumerate(open_groups)]
        open_groups += [(0, False)] * GroupBook(self.admission, counts, numbered).allowance()
        return steps, tuple(sorted(open_groups) if self.rule.order == "ready" else open_groups)

    def after_engines(self, state: State, filters: bool) -> Iterator[State]:
        """A group ends and is kept, or filtered."""
        steps, known = state
        for place, (version, decided) in enumerate(known):
            if not decided:
                others = known[:place], known[place + 1 :]
                yield self.state(steps, [*others[0], (version, True), *others[1]])
                if filters:
                    yield self.state(steps, [*others[0], *others[1]])

    def after_failures(self, state: State) -> Iterator[State]:
        """A group fails and is sampled anew, by the published version."""
        steps, known = state
        for place, (_, decided) in enumerate(known):
            if not decided:
                yield self.state(steps, [*known[:place], (0, False), *known[place + 1 :]])

    def after_drops(self, state: State) -> Iterator[State]:
        """Those that are too old are replaced."""
        steps, known = state
        decision = next_batch(
            [OpenGroup(place, *one) for place, one in enumerate(known)], steps + 1, self.rule
        )
        if decision.dropped:
            yield self.state(steps, [one for place, one in enumerate(known) if place not in decision.dropped])

    def after_resumed_step(self, state: State) -> Iterator[State]:
        """A step is trained, the run is ended and goes on: it publishes between two publications."""
        trained = self.after_step(state, next_batch)
        if trained and trained[0][0]:
            steps, known = trained[0]
            yield self.state(0, [(version - steps, decided) for version, decided in known])

    def after_step(self, state: State, decide: Decide) -> tuple[State, list[int]] | None:
        """A step is trained, and published if it is its turn; also the ages of its groups. None: it waits."""
        steps, known = state
        numbers = decide(
            [OpenGroup(place, *one) for place, one in enumerate(known)], steps + 1, self.rule
        ).numbers
        if not numbers:
            return None
        assert len(set(numbers)) == self.rule.batch
        assert all(known[number][1] for number in numbers)
        ages = [steps - known[number][0] for number in numbers]
        left = [one for place, one in enumerate(known) if place not in numbers]
        if steps + 1 < self.every:
            return self.state(steps + 1, left), ages
        return self.state(0, [(version - self.every, decided) for version, decided in left]), ages

    def after_just_enough_engines(self, state: State) -> Iterator[State]:
        """B groups end: any of those that are open, or the lowest numbers where nothing else makes a
        batch."""
        steps, known = state
        versions = [version for version, _ in known]
        if self.rule.order == "admitted":
            yield steps, tuple((version, place < self.rule.batch) for place, version in enumerate(versions))
            return
        for ended in combinations_with_replacement(sorted(set(versions)), self.rule.batch):
            left = Counter(ended)
            if not left - Counter(versions):
                yield steps, tuple((version, self._takes_one(left, version)) for version in versions)

    @staticmethod
    def _takes_one(left: Counter[int], version: int) -> bool:
        left[version] -= 1
        return left[version] >= 0


def oldest_over_all_interleavings(
    run: Run, decide: Decide = next_batch, *, filters: bool = False, disturbed: bool = False
) -> int:
    """The largest age that is ever trained on, whatever the engines do; no state may be without a way on.

    ``disturbed``: groups fail, and the run is ended and resumed after any step.
    """
    start = run.state(0, [])
    seen, todo, oldest = {start}, [start], 0
    while todo:
        state = todo.pop()
        following = set(run.after_drops(state))
        if following:  # before anything else
            todo += following - seen
            seen |= following
            continue
        following = set(run.after_engines(state, filters))
        if disturbed:
            following |= {*run.after_failures(state), *run.after_resumed_step(state)}
        trained = run.after_step(state, decide)
        assert following or trained, f"the run is stuck in {state}"
        if trained:
            following.add(trained[0])
            oldest = max(oldest, *trained[1])
        todo += following - seen
        seen |= following
    return oldest


SMALL = [
    (order, every, Fraction(ahead), hard, batch)
    for order, every, ahead, hard, batch in product(
        ("admitted", "ready"), (1, 2, 3), range(4), range(4), (1, 2, 3)
    )
    if hard >= ahead and (order == "ready" or hard == ahead)
]


def oldest_over_all_batches(run: Run) -> int:
    """The same, where every group ends just before the step that trains on it: those left behind count,
    decided or not, so it makes no difference to any batch when they end. Far fewer states."""
    start = run.state(0, [])
    seen, todo, oldest = {start}, [start], 0
    while todo:
        state = todo.pop()
        trained = [run.after_step(ended, next_batch) for ended in run.after_just_enough_engines(state)]
        following = {one[0] for one in trained if one}
        assert following, f"the run is stuck in {state}"
        oldest = max(oldest, *(age for one in trained if one for age in one[1]))
        todo += following - seen
        seen |= following
    return oldest


def places(settings: tuple[str, int, Fraction, int, int]) -> int:
    """Groups that are open at once; the states of a run grow exponentially with it."""
    _, every, ahead, _, batch = settings
    return math.ceil(every * (1 + ahead) * batch)


@pytest.mark.parametrize("settings", SMALL, ids=str)
def test_the_bound_is_reached_and_never_exceeded(settings: tuple[str, int, Fraction, int, int]) -> None:
    """T19, for M, k, K and B up to 3 in both orders; every event of every order of events where that is
    feasible."""
    run = Run(*settings)
    # Without a lead everything is trained before the next publication, whatever the hard bound.
    bound = run.rule.oldest if settings[2] else run.every - 1
    assert oldest_over_all_batches(run) == bound
    if places(settings) <= 6:
        assert oldest_over_all_interleavings(run) == oldest_over_all_interleavings(run, filters=True) == bound


FRACTIONS = [
    ("admitted", 2, Fraction(1, 2), 0, 1),
    ("ready", 1, Fraction(1, 2), 1, 2),
    ("ready", 2, Fraction(1, 2), 1, 1),
    ("ready", 2, Fraction(1, 2), 1, 2),
    ("ready", 3, Fraction(1, 3), 1, 1),
]


@pytest.mark.parametrize("settings", [*(one for one in SMALL if places(one) <= 5), *FRACTIONS], ids=str)
def test_filters_failures_and_resumed_runs_keep_the_bound(
    settings: tuple[str, int, Fraction, int, int],
) -> None:
    """T19, T3: a failed group is younger than its number, and a resumed run may publish between two
    publications."""
    run = Run(*settings)
    assert oldest_over_all_interleavings(run, filters=True, disturbed=True) <= run.rule.oldest


@pytest.mark.parametrize(
    "settings", [one for one in [*SMALL, *FRACTIONS] if one[0] == "ready" and places(one) <= 5], ids=str
)
def test_dropping_keeps_the_bound_and_never_sticks(settings: tuple[str, int, Fraction, int, int]) -> None:
    run = Run(*settings, late="drop")
    bound = run.rule.oldest if settings[2] else run.every - 1
    assert oldest_over_all_interleavings(run) == bound
    assert oldest_over_all_interleavings(run, filters=True, disturbed=True) <= run.rule.oldest


def looks_at_the_oldest_alone(open_groups: Iterable[OpenGroup], step: int, rule: ReplayRule) -> NextBatch:
    """The weaker condition: a batch may be made as long as the oldest group left behind has a step left."""
    known = list(open_groups)
    decided = sorted((one for one in known if one.is_accepted), key=lambda one: (one.version, one.number))
    batch = decided[: rule.batch]
    left = [one.version for one in known if one not in batch]
    waits_for_somebody = len(decided) < len(known)
    if len(batch) < rule.batch or (waits_for_somebody and left and step - min(left) > rule.oldest):
        return NextBatch()
    return NextBatch(tuple(one.number for one in batch))


@pytest.mark.parametrize(
    "settings", [("ready", 1, Fraction(2), 2, 1), ("ready", 2, Fraction(1), 1, 1)], ids=str
)
def test_the_oldest_alone_exceeds_the_bound(settings: tuple[str, int, Fraction, int, int]) -> None:
    run = Run(*settings)
    assert oldest_over_all_interleavings(run, looks_at_the_oldest_alone) > run.rule.oldest
    assert oldest_over_all_interleavings(run) == run.rule.oldest
