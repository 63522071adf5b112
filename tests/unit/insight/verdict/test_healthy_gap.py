"""A gap of twice what the precision makes is to be looked at: from the start, or later."""

from pathlib import Path

import pytest

from verl_rc.health.cause_table import LARGER_THAN_HEALTHY, ROUNDING
from verl_rc.health.causes import cause_statement
from verl_rc.insight.run_folder import ReplayedRecord, RunData, Series
from verl_rc.insight.run_folder.records import OWN_RUN
from verl_rc.insight.verdict.diagnosis import ranked
from verl_rc.insight.verdict.healthy_gap import HEALTHY, larger_than_healthy

STEPS = range(1, 11)


def run_with(noise: list[float], mean: list[float]) -> RunData:
    series = {"rollout_corr/logit_noise": noise, "sync/rollout_gap_mean": mean}
    columns = {name: Series(STEPS, values) for name, values in series.items()}
    return RunData("run", Path("run"), OWN_RUN, STEPS, columns)


def replayed(gap: float, healthy: float | None, step: int = 1) -> ReplayedRecord:
    return ReplayedRecord(step, 0, 700, gap, numbers={} if healthy is None else {HEALTHY: healthy})


FLAT = run_with([0.03] * 10, [0.01] * 10)


@pytest.mark.parametrize(
    ("gap", "healthy", "is_said"),
    [
        (0.010, 0.010, False),
        (0.019, 0.010, False),
        (0.021, 0.010, True),
        (0.0019, 0.0, False),
        (0.1, None, False),
    ],
)
def test_from_the_start(gap: float, healthy: float | None, is_said: bool) -> None:
    """Twice the healthy gap; nats below those that count as reproduced are none."""
    statements = larger_than_healthy(FLAT, [replayed(gap, healthy)])
    assert [one.cause for one in statements] == ([LARGER_THAN_HEALTHY.name] if is_said else [])
    assert all(one.level == "notice" and "R3" in one.next_test for one in statements)


@pytest.mark.parametrize(
    ("noise", "mean", "steps"),
    [
        (3.0, 3.0, (7, 10)),  # 0.8 times the healthy gap at the start, 2.4 times later
        (3.0, 1.2, None),  # a policy that grows certain: few tokens
        (2.4, 2.4, None),  # 1.92 times
    ],
)
def test_later(noise: float, mean: float, steps: tuple[int, int] | None) -> None:
    run = run_with([0.03] * 6 + [0.03 * noise] * 4, [0.01] * 6 + [0.01 * mean] * 4)
    statements = larger_than_healthy(run, [replayed(0.008, 0.010), replayed(0.5, None, step=5)])
    assert [one.steps for one in statements] == ([] if steps is None else [steps])
    if steps:
        assert statements[0].evidence["times"] == pytest.approx(2.4)


def test_it_stands_in_place_of_rounding_and_behind_faults() -> None:
    look = larger_than_healthy(FLAT, [replayed(0.1, 0.01)])[0]
    rounding = cause_statement(ROUNDING, {"gap": 0.1}, sentence="{gap}")
    fault = cause_statement(
        LARGER_THAN_HEALTHY, {"gap": 1, "times": 1, "step": 1, "healthy": 1}, level="fault"
    )
    assert ranked([rounding], [look]) == [look]
    assert ranked([rounding], [fault, look]) == [fault, look]
