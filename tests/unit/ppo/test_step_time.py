"""What an asynchronous step takes, from sides that were measured apart; and whether a larger staleness bound helps."""

import pytest

from verl_rc.config.async_training import AsyncTrainingConfig
from verl_rc.ppo.step_time import MeasuredStep, WaitTotals


def options(k: float, *, partial: bool = False, every: int = 1) -> AsyncTrainingConfig:
    return AsyncTrainingConfig(staleness_threshold=k, partial_rollout=partial, trigger_parameter_sync_step=every)


@pytest.mark.parametrize(
    ("measured", "given", "expected"),
    [
        (MeasuredStep(10, 10), options(0), (20, 20)),
        (MeasuredStep(10, 10), options(0, every=4), (10, 20)),
        (MeasuredStep(12, 10), options(1), (12, 12)),
        (MeasuredStep(12, 10), options(3), (12, 12)),
        (MeasuredStep(30, 10), options(1, partial=True), (15, 30)),  # two publications' time for the longest response
        (MeasuredStep(30, 10), options(2, partial=True), (10, 30)),
        (MeasuredStep(30, 10), options(5, partial=True), (10, 30)),
    ],
)
def test_the_bounds_of_a_step(measured: MeasuredStep, given: AsyncTrainingConfig, expected: tuple[float, float]) -> None:
    assert (measured.fastest(given), measured.slowest(given)) == expected


@pytest.mark.parametrize(
    ("sampling", "training", "partial", "useful"),
    [(10, 10, False, 1), (90, 10, False, 1), (10, 10, True, 1), (30, 10, True, 2), (31, 10, True, 3), (5, 10, True, 1)],
)
def test_the_smallest_useful_staleness(sampling: float, training: float, partial: bool, useful: int) -> None:
    assert MeasuredStep(sampling, training).smallest_useful_staleness(options(1, partial=partial)) == useful


@pytest.mark.parametrize(
    ("measured", "given", "said"),
    [
        (MeasuredStep(95, 5), options(1), "no staleness_threshold helps: sampling takes 95% of a step in turns"),
        (MeasuredStep(5, 95), options(1, partial=True), "no staleness_threshold helps: training takes 95% of a step in turns"),
        (MeasuredStep(10, 10), options(3), "staleness_threshold=1 is the smallest useful one"),
        (MeasuredStep(30, 10), options(1, partial=True), "staleness_threshold=2 is the smallest that can keep the trainer busy"),
        (MeasuredStep(10, 10), options(1), "a step takes 10 s, in turns 20 s"),
    ],
)
def test_when_more_staleness_cannot_help_it_is_said(measured: MeasuredStep, given: AsyncTrainingConfig, said: str) -> None:
    """T26."""
    assert said in " ".join(measured.prediction(given))


def test_the_staleness_that_fits_is_not_talked_about() -> None:
    assert len(list(MeasuredStep(10, 10).prediction(options(1)))) == 1


@pytest.mark.parametrize("seconds", [(0, 1), (1, -1), (float("nan"), 1), (1, float("inf"))])
def test_seconds_that_cannot_be(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must take more than 0 seconds"):
        MeasuredStep(*seconds)


# Two steps of 10 s; seconds waited in each, of the slowest group, the section, and what is said.
ENDS = [
    (0.0, 9, options(1), "waited for samples 0% of the time with staleness_threshold=1"),
    (0.1, 25, options(2), "1 would have kept it busy too, with younger tokens: whole responses never need more"),
    (5.0, 25, options(1), "engines are the slower side: more devices for them help"),
    (5.0, 14, options(1, partial=True), "2 would have kept it busy: the slowest prompt took 14 s, a step without waiting 5 s"),
    (5.0, 9, options(1, partial=True), "engines are the slower side"),
    (0.0, 14, options(4, partial=True), "1 would have kept it busy too, with younger tokens: the slowest prompt took 14 s"),
    (5.0, 5, options(0, every=4), "1 would have kept it busy"),
]


@pytest.mark.parametrize(("waited", "longest", "given", "said"), ENDS)
def test_the_end_of_a_run_names_the_smallest_useful_staleness(
    waited: float, longest: float, given: AsyncTrainingConfig, said: str
) -> None:
    totals = WaitTotals().with_step(10, waited, longest).with_step(10, waited, longest / 2)
    assert said in totals.advice(given)


def test_a_staleness_that_was_right_gets_no_advice() -> None:
    assert ";" not in WaitTotals().with_step(10, 0.1, 9).advice(options(1))
