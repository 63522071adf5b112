"""The rules under simulated engines: they do what the design's simulator predicts, and train on what was
sampled.

Literals are what that simulator printed for the same engines and lengths; it decides by itself and shares no
code with this.
"""

import random
from collections.abc import Callable
from fractions import Fraction
from itertools import pairwise
from typing import Literal

import pytest
from simulated_engines import Mode, Outcome, Turn, conversations, run_loop

from verl_rc.algorithm.supply.step_time import MeasuredStep
from verl_rc.config.async_training import AsyncTrainingConfig

Prediction = tuple[float, float, int, float, float]
"""Seconds from one publication to the next, mean and largest age (steps), share of tokens wasted, length
trained / admitted."""

ONE, TWO, HALF = Fraction(1), Fraction(2), Fraction(1, 2)
PREDICTED: list[tuple[Mode, Prediction]] = [
    (Mode(), (13.91705912379609, 0.0, 0, 0.0, 1.052602822807279)),
    (Mode(ONE), (8.118751213917736, 1.0, 1, 0.0, 1.0561900655944543)),
    (Mode(TWO), (6.014136016232366, 2.0, 2, 0.0, 1.0430164738210377)),
    (Mode(ONE, partial=False), (13.211393333333325, 1.0, 1, 0.0, 1.0561900655944543)),
    (Mode(every=4, order="ready"), (13.239883119567754, 1.5, 3, 0.0, 1.052602822807279)),
    (Mode(HALF, ONE, every=4, order="ready"), (6.811945827773771, 3.5, 7, 0.0, 1.0318565516378118)),
    (Mode(HALF, every=2), (8.864618643791735, 1.5, 2, 0.0, 1.0017680699091713)),
    (Mode(ONE, order="ready"), (8.783801494551259, 1.0, 1, 0.0, 1.0561900655944543)),
    (Mode(ONE, TWO, order="ready"), (5.7772289917464645, 0.9861111111111112, 2, 0.0, 1.0153037488460686)),
    (
        Mode(TWO, Fraction(3), order="ready"),
        (5.2849718731522, 2.0416666666666665, 3, 0.0, 1.1379126874015006),
    ),
    (
        Mode(ONE, order="ready", late="drop"),
        (2.8089061660382244, 0.4444444444444444, 1, 0.29472469367695536, 0.6528846572057014),
    ),
    (
        Mode(TWO, order="ready", late="drop"),
        (1.9822179839626612, 1.0347222222222223, 2, 0.35588285290300525, 0.6122883369976961),
    ),
]


@pytest.mark.parametrize(("mode", "prediction"), PREDICTED, ids=[str(mode) for mode, _ in PREDICTED])
def test_the_simulator_predicts_the_rules(mode: Mode, prediction: Prediction) -> None:
    outcome = run_loop(mode)
    mean_age = sum(outcome.ages) / len(outcome.ages)
    found = (outcome.step_seconds, mean_age, max(outcome.ages), outcome.wasted, outcome.length_ratio)
    assert found == pytest.approx(prediction, rel=1e-9)


def ks_distance(one: list[int], other: list[int]) -> float:
    """Largest difference between two empirical distribution functions (Kolmogorov and Smirnov)."""
    points = sorted({*one, *other})
    return max(
        abs(
            sum(value <= point for value in one) / len(one)
            - sum(value <= point for value in other) / len(other)
        )
        for point in points
    )


def trained_and_admitted(mode: Mode) -> Outcome:
    return run_loop(mode, publications=60, seed=3)


WAITING = [Mode(), Mode(TWO), Mode(ONE, TWO, order="ready"), Mode(TWO, Fraction(3), order="ready")]


@pytest.mark.parametrize("mode", WAITING, ids=str)
def test_what_is_trained_is_distributed_as_what_was_admitted(mode: Mode) -> None:
    """T4: long answers and slow prompts train as often as they were drawn; only the last in flight are
    missing."""
    outcome = trained_and_admitted(mode)
    assert ks_distance(outcome.trained, outcome.admitted) < 0.01
    assert sum(outcome.trained) / len(outcome.trained) == pytest.approx(
        sum(outcome.admitted) / len(outcome.admitted), rel=0.02
    )


def test_dropping_trains_on_short_answers() -> None:
    """What ``wait`` is the default for, and proof that the distance above can see it."""
    outcome = trained_and_admitted(Mode(ONE, order="ready", late="drop"))
    assert ks_distance(outcome.trained, outcome.admitted) > 0.05
    assert sum(outcome.trained) / len(outcome.trained) < 0.8 * sum(outcome.admitted) / len(outcome.admitted)


def test_a_larger_lead_is_never_slower_in_order_of_admission() -> None:
    seconds = [run_loop(Mode(Fraction(ahead))).step_seconds for ahead in (0, 1, 2, 4)]
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(seconds))
    assert seconds[-1] < 0.6 * seconds[0]


@pytest.mark.parametrize("mode", [*WAITING, Mode(HALF, ONE, every=4, order="ready")], ids=str)
def test_a_run_that_knows_its_end_leaves_nothing_in_flight(mode: Mode) -> None:
    outcome = run_loop(mode, ends=True)
    assert sorted(outcome.trained) == sorted(outcome.admitted)


@pytest.mark.parametrize(("ahead", "seconds"), [(0, 4.5), (1, 4.5 / 2), (3, 4.5 / 4), (4, 1.0)])
def test_conversations_wait_for_tools_beside_training(ahead: int, seconds: float) -> None:
    """10 tokens, 2 s of a tool, 5 tokens, 1 s of training: 4.5 s in turns; a step takes (4.5 s) / (k + 1), at
    least 1 s."""
    cluster = conversations(100, 1, 2, lambda _: [(Turn(10, 2.0), Turn(5))])
    found = run_loop(Mode(Fraction(ahead)), cluster, publications=65, warm_up=5)
    assert found.step_seconds == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("order", ["admitted", "ready"])
@pytest.mark.parametrize(("every", "longest"), [(1, 3.5), (1, 5.0), (2, 3.5), (4, 9.0)])
def test_the_smallest_useful_staleness_is_enough(
    order: Literal["admitted", "ready"], every: int, longest: float
) -> None:
    """With it no step waits, whatever the groups take; with one less and groups that all take the longest
    time, steps do."""

    def step_seconds(ahead: int, seconds: Callable[[random.Random], float]) -> float:
        cluster = conversations(1, every, 2 * every, lambda rng: [(Turn(1, seconds(rng) - 0.002), Turn(1))])
        mode = Mode(Fraction(ahead), every=every, order=order)
        return run_loop(mode, cluster, publications=60, warm_up=10).step_seconds / every

    given = AsyncTrainingConfig(
        staleness_threshold=1, partial_rollout=True, trigger_parameter_sync_step=every
    )
    useful = MeasuredStep(longest, 1.0).smallest_useful_staleness(given)
    assert step_seconds(useful, lambda rng: rng.uniform(0.1, longest)) == pytest.approx(1)
    assert step_seconds(useful, lambda _: longest) == pytest.approx(1)
    assert step_seconds(useful - 1, lambda _: longest) > 1.05
