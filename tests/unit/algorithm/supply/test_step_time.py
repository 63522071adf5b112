"""What an asynchronous step takes, from sides that were measured apart; and whether a larger staleness bound
helps."""

import pytest

from verl_rc.algorithm.supply.step_time import MeasuredStep
from verl_rc.config.async_training import AsyncTrainingConfig


def options(k: float, *, partial: bool = False, every: int = 1) -> AsyncTrainingConfig:
    return AsyncTrainingConfig(
        staleness_threshold=k, partial_rollout=partial, trigger_parameter_sync_step=every
    )


@pytest.mark.parametrize(
    ("measured", "given", "expected"),
    [
        (MeasuredStep(10, 10), options(0), (20, 20)),
        (MeasuredStep(10, 10), options(0, every=4), (10, 20)),
        (MeasuredStep(12, 10), options(1), (12, 12)),
        (MeasuredStep(12, 10), options(3), (12, 12)),
        (
            MeasuredStep(30, 10),
            options(1, partial=True),
            (40 / 3, 30),
        ),  # at most two steps old: trained on in the third step
        (MeasuredStep(30, 10), options(2, partial=True), (10, 30)),
        (MeasuredStep(30, 10), options(5, partial=True), (10, 30)),
    ],
)
def test_the_bounds_of_a_step(
    measured: MeasuredStep, given: AsyncTrainingConfig, expected: tuple[float, float]
) -> None:
    assert (measured.fastest(given), measured.slowest(given)) == expected


@pytest.mark.parametrize(
    ("sampling", "given", "useful"),
    [
        (10, options(1), 1),
        (90, options(1), 1),
        (10, options(1, partial=True), 1),
        (30, options(1, partial=True), 3),
        (31, options(1, partial=True), 4),
        (5, options(1, partial=True), 1),
        (31, options(1, partial=True, every=2), 2),
    ],
)
def test_the_smallest_useful_staleness(sampling: float, given: AsyncTrainingConfig, useful: int) -> None:
    assert MeasuredStep(sampling, 10).smallest_useful_staleness(given) == useful


@pytest.mark.parametrize("seconds", [(0, 1), (1, -1), (float("nan"), 1), (1, float("inf"))])
def test_seconds_that_cannot_be(seconds: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must take more than 0 seconds"):
        MeasuredStep(*seconds)
