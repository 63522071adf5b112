"""What is said of staleness: before a run from sides that were measured apart, at its end from how long the
trainer waited."""

import pytest

from verl_rc.algorithm.supply.ahead import advice, prediction
from verl_rc.algorithm.supply.step_time import MeasuredStep, WaitTotals
from verl_rc.config.async_training import AsyncTrainingConfig


def options(k: float, *, partial: bool = False, every: int = 1) -> AsyncTrainingConfig:
    return AsyncTrainingConfig(
        staleness_threshold=k, partial_rollout=partial, trigger_parameter_sync_step=every
    )


@pytest.mark.parametrize(
    ("measured", "given", "said"),
    [
        (
            MeasuredStep(95, 5),
            options(1),
            "no staleness_threshold helps: sampling takes 95% of a step in turns",
        ),
        (
            MeasuredStep(5, 95),
            options(1, partial=True),
            "no staleness_threshold helps: training takes 95% of a step in turns",
        ),
        (MeasuredStep(10, 10), options(3), "staleness_threshold=1 is the smallest useful one"),
        (
            MeasuredStep(30, 10),
            options(1, partial=True),
            "staleness_threshold=3 is the smallest that keeps the trainer busy",
        ),
        (MeasuredStep(10, 10), options(1), "a step takes 10 s, in turns 20 s"),
    ],
)
def test_when_more_staleness_cannot_help_it_is_said(
    measured: MeasuredStep, given: AsyncTrainingConfig, said: str
) -> None:
    """T26."""
    assert said in " ".join(prediction(measured, given))


def test_the_staleness_that_fits_is_not_talked_about() -> None:
    assert len(list(prediction(MeasuredStep(10, 10), options(1)))) == 1


# Two steps of 10 s; seconds waited in each, of the slowest group, the section, and what is said.
ENDS = [
    (0.0, 9, options(1), "waited for samples 0% of the time with staleness_threshold=1"),
    (
        0.1,
        25,
        options(2),
        "with 1 it would not have waited either, with younger tokens: whole responses need more",
    ),
    (5.0, 25, options(1), "engines are the slower side: more devices for them help"),
    (
        5.0,
        14,
        options(1, partial=True),
        "with 3 it would not have waited: the slowest prompt took 14 s, a step without waiting 5 s",
    ),
    (5.0, 5, options(1, partial=True), "engines are the slower side"),
    (
        0.0,
        14,
        options(4, partial=True),
        "with 2 it would not have waited either, with younger tokens: the slowest prompt took 14 s",
    ),
    (5.0, 5, options(0, every=4), "with 1 it would not have waited"),
]


@pytest.mark.parametrize(("waited", "longest", "given", "said"), ENDS)
def test_the_end_of_a_run_names_the_smallest_useful_staleness(
    waited: float, longest: float, given: AsyncTrainingConfig, said: str
) -> None:
    totals = WaitTotals().with_step(10, waited, longest).with_step(10, waited, longest / 2)
    assert said in advice(totals, given)


def test_a_staleness_that_was_right_gets_no_advice() -> None:
    assert ";" not in advice(WaitTotals().with_step(10, 0.1, 9), options(1))
