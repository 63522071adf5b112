"""The rule of admission: how far generation may be ahead, what frees a place, and that a resumed run goes on
with it.

That the ages of what is trained stay within the bound is shown in ``test_replay_order.py``, over all
interleavings.
"""

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from pydantic import TypeAdapter

from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.ppo.admission import Admission, AdmissionError, AdmissionState, NumberRanges


def from_disk(state: AdmissionState) -> AdmissionState:
    states = TypeAdapter(AdmissionState)
    return states.validate_json(states.dump_json(state))


def rule_of(batch: int, every: int = 1, bound: Fraction = Fraction(0), **fields: int) -> Admission:
    """The rule at the start of a run: a publication every so many steps, and so many of them ahead."""
    options = AsyncTrainingConfig(trigger_parameter_sync_step=every, staleness_threshold=float(bound))
    return Admission(batch, options.groups_in_memory(batch), **fields)


def undecided_in(admission: Admission) -> NumberRanges:
    """Numbers that are being sampled or scored."""
    return admission.decided.missing_below(admission.admitted)


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
    admission = rule_of(batch=8, every=every, bound=bound, published=published)
    assert admission.allowance() == limit
    full = admission.admit(limit)
    assert full.allowance() == 0
    with pytest.raises(AdmissionError, match="at most 0 groups may be admitted"):
        full.admit(1)


def test_a_publication_admits_as_many_as_its_steps_train() -> None:
    full = rule_of(batch=8, every=2, bound=Fraction(1)).admit(32)
    assert full.publish(2).allowance() == 16


def test_a_replaced_group_frees_its_place_at_once_and_a_kept_one_does_not() -> None:
    full = rule_of(batch=4).admit(4)
    assert full.keep([0, 2]).allowance() == 0
    assert full.free([1, 3]).allowance() == 2
    assert full.keep([0]).drop([0, 1]).allowance() == 2


def test_the_last_steps_admit_nothing_beyond_the_run() -> None:
    admission = rule_of(batch=4, bound=Fraction(2), total=10).admit(10)
    assert admission.publish(7).allowance() == 0
    assert admission.publish(7).free([9]).allowance() == 1


MOVES = [
    lambda a: a.keep([1]),
    lambda a: a.keep([4]),
    lambda a: a.free([1]),
    lambda a: a.free([2]),
    lambda a: a.drop([4]),
]


@pytest.mark.parametrize("move", MOVES)
def test_a_group_is_decided_once_and_after_its_admission(move) -> None:
    admission = rule_of(batch=4).admit(4).keep([1]).free([2])
    with pytest.raises(AdmissionError, match="a group is decided once, after its admission"):
        move(admission)


def test_versions_only_grow() -> None:
    with pytest.raises(AdmissionError, match="3 was published after 4"):
        rule_of(batch=1, published=4).publish(3)


@pytest.mark.parametrize("wrong", [{"batch": 0}, {"places": 0}, {"published": -1}])
def test_a_rule_that_admits_nothing_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must be >= 1"):
        Admission(**{"batch": 1, "places": 1, **wrong})


def test_a_dropped_number_pins_nothing() -> None:
    """T2: numbers behind a dropped one stay decided; after a resume only what was open is given to the
    engines again."""
    before = rule_of(batch=2, bound=Fraction(2)).admit(6).keep([0, 1, 3]).free([2])
    after = rule_of(batch=2, bound=Fraction(2)).resumed(from_disk(before.state()))
    assert after == before
    assert list(undecided_in(after)) == [4, 5]
    for number in (0, 1, 2, 3):
        with pytest.raises(AdmissionError):
            after.keep([number])


@pytest.mark.parametrize("change", [{"admitted": 3}, {"replaced": 5}, {"decided": ((0, 9),)}])
def test_a_state_that_contradicts_itself_is_refused(change) -> None:
    state = rule_of(batch=2, bound=Fraction(2)).admit(6).keep([0, 1, 3]).free([2]).state()
    with pytest.raises(ValueError, match="decided numbers must be below"):
        rule_of(batch=2).resumed(replace(state, **change))


def test_a_resumed_run_with_a_smaller_bound_admits_nothing_until_it_has_room() -> None:
    state = rule_of(batch=2, bound=Fraction(3)).admit(8).state()
    smaller = rule_of(batch=2, bound=Fraction(0)).resumed(state)
    assert [smaller.publish(version).allowance() for version in range(6)] == [0, 0, 0, 0, 2, 4]


@pytest.mark.parametrize("seed", range(20))
def test_no_burst_after_a_resume(seed: int) -> None:
    """T3: at every event of a random history with resumes, what is admitted is what one count of all events
    allows."""
    rng = random.Random(seed)
    every, bound, batch = rng.randint(1, 3), Fraction(rng.randint(0, 6), 2), rng.randint(1, 3)
    rule = rule_of(batch=batch, every=every, bound=bound)
    admission, replaced, trained, undecided = rule, 0, 0, []
    for _ in range(300):
        event = rng.choice(["admit", "keep", "free", "publish", "resume"])
        if event == "admit" and admission.allowance():
            count = rng.randint(1, admission.allowance())
            undecided += range(admission.admitted, admission.admitted + count)
            admission = admission.admit(count)
        elif event in ("keep", "free") and undecided:
            number = undecided.pop(rng.randrange(len(undecided)))
            admission = admission.keep([number]) if event == "keep" else admission.free([number])
            replaced += event == "free"
        elif event == "publish" and admission.admitted - replaced >= (trained + every) * batch:
            trained += every
            admission = admission.publish(trained)
        elif event == "resume":
            admission = rule.resumed(from_disk(admission.state()))
        assert admission.admitted < (trained + every * (1 + bound)) * batch + replaced + 1
        assert undecided_in(admission) == NumberRanges.from_numbers(undecided)
    assert admission.admitted > 5


def test_ninety_percent_that_tell_nothing_do_not_starve_the_engines() -> None:
    """T13: every filtered group is replaced at once, so the run goes on with as many in flight as before."""
    rng = random.Random(0)
    admission = rule_of(batch=4, bound=Fraction(1))
    trained = 0
    while trained < 200:
        admission = admission.admit(admission.allowance())
        assert len(undecided_in(admission)) + len(admission.decided) - admission.replaced - 4 * trained == 8
        number = next(iter(undecided_in(admission)))
        admission = admission.free([number]) if rng.random() < 0.9 else admission.keep([number])
        if len(admission.decided) - admission.replaced == 4 * (trained + 1):
            trained += 1
            admission = admission.publish(trained)
    assert admission.replaced > 5000
