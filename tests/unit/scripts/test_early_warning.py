"""What is said of signals before a fall: areas by counting pairs, planted signals, and what is left out."""

import numpy as np
import pytest
from evidence.early_warning import (
    HORIZON,
    SIGNALS,
    alert,
    area_under_curve,
    below_best,
    divided,
    examine,
    growth,
    section,
    smooth,
    threshold_of,
    watch,
)

from verl_rc.study.runs import Run
from verl_rc.study.study import ACCURACY

GAP = "rollout_corr/k3_kl"


def run(
    arm: str, seed: int, accuracies: list[float], gaps: list[float] | None = None, status: int = 0
) -> Run:
    curves = {ACCURACY: [(10 * place, value) for place, value in enumerate(accuracies)]}
    if gaps is not None:
        curves[GAP] = list(enumerate(gaps, start=1))
    return Run(arm, seed, [], status, 1.0, curves)


FALLING, HEALTHY = [0.2, 0.5, 0.6, 0.6, 0.3, 0.2], [0.2, 0.5, 0.6, 0.6, 0.65, 0.6]


def test_the_area_counts_pairs() -> None:
    alarming, calm = np.array([0.5, 2.0, 2.0, 4.0]), np.array([0.0, 1.0, 2.0, 3.0, 3.0])
    pairs = [(a > c) + (a == c) / 2 for a in alarming for c in calm]
    assert area_under_curve(alarming, calm) == pytest.approx(sum(pairs) / len(pairs))


def test_the_threshold_tells_the_two_apart_best() -> None:
    assert threshold_of(np.array([3.0, 4.0, 9.0]), np.array([1.0, 2.0, 5.0])) == 3.0
    assert threshold_of(np.array([3.0, 4.0, 9.0]), np.array([3.0, 3.0, 5.0])) in (4.0, 9.0)


def test_series_look_back_alone() -> None:
    smoothed = smooth([(0, 99.0), *((step, float(step)) for step in range(1, 13))])
    assert smoothed[5] == 3.0
    assert (min(smoothed), max(smoothed)) == (5, 12)
    grown = growth(smoothed)
    assert grown[10] == pytest.approx(8.0 / 5.0)  # the median of 3, 4, 5, 6, 7
    assert min(grown) == 10
    assert below_best({1: 0.5, 2: 0.8, 3: 0.6}) == {1: 0.0, 2: 0.0, 3: pytest.approx(0.2)}


def test_runs_that_nothing_can_warn_of_are_left_out() -> None:
    watched = watch(
        [
            run("fell", 1, FALLING),
            run("at-once", 1, [0.5, 0.2, 0.1]),
            run("failed", 1, HEALTHY, status=1),
            run("healthy", 1, HEALTHY),
        ]
    )
    assert [(found.run.arm, found.last_sound) for found in watched] == [("fell", 30), ("healthy", None)]


def test_the_steps_before_a_fall_count_and_no_others() -> None:
    fell, healthy = watch(
        [run("fell", 1, FALLING, [float(k) for k in range(1, 51)]), run("h", 1, HEALTHY, [0.0] * 50)]
    )
    signal = SIGNALS["gap (k3), high"]
    assert fell.values(signal).tolist() == [step - 2.0 for step in range(31 - HORIZON, 31)]
    assert len(healthy.values(signal)) == 46


def planted(warns: bool) -> dict[str, list[Run]]:
    """Runs that fall at step 40; before, from step 15 on, the gap is wide in these alone, or in all."""
    rng, runs = np.random.default_rng(1), []
    for seed in range(60):
        falls = seed % 3 == 0
        gaps = rng.uniform(0.001, 0.002, 50)
        if falls or not warns:
            gaps[14:] += 0.05
        runs.append(run("a", seed, FALLING if falls else HEALTHY, gaps.tolist()))
    return {"s": runs}


def test_a_planted_warning_is_found_and_noise_is_not() -> None:
    signal = SIGNALS["gap (k3), high"]
    found = examine(signal, *divided(planted(warns=True)))
    assert found is not None
    assert (found.auc, found.interval, found.predicts) == (1.0, (1.0, 1.0), True)
    assert (found.warned, found.lead, found.false_alarms) == (found.falls, HORIZON - 1, 0.0)
    other = examine(
        signal,
        *divided(
            {"s": [run("a", seed, FALLING if seed % 3 else HEALTHY, [0.001] * 50) for seed in range(40)]}
        ),
    )
    assert other is not None
    assert (other.auc, other.predicts) == (0.5, False)
    told = " ".join(section(planted(warns=True))).replace("\n", " ")
    assert "20 are left" in told
    assert "above one half: gap (k3), high" in told


def test_the_trainers_own_warning_needs_three_steps() -> None:
    found = alert(run("a", 1, HEALTHY, [0.001, 0.9, 0.9, 0.001, 0.9, 0.9, 0.9, 0.9, 0.001]), GAP)
    assert [step for step, value in found.items() if value] == [7, 8]
