"""Runs side by side: intervals, seeds of one configuration, keys that differ, and the step at which curves
part."""

import math
import random

import pytest
from planted_series import STEPS, planted, wave

from verl_rc.insight.page import build_page
from verl_rc.insight.page.charts import PANELS, charts_of
from verl_rc.insight.page.comparison import comparison_panel, first_divergence, t_interval
from verl_rc.insight.run_folder import Series
from verl_rc.insight.verdict import judge


def named(name, metrics=None, settings=None):
    run = planted(metrics or {}, settings)
    run.name = name
    return run


def series(values):
    return Series(list(range(1, len(values) + 1)), list(values))


def test_the_t_interval_of_three_seeds():
    # Mean 2, deviation 1, t(0.95, 2) = 2.920: half the interval is 2.920 / sqrt(3).
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx(2.920 / math.sqrt(3))


@pytest.mark.parametrize("parts_at", [61, 101])
def test_the_step_at_which_two_runs_part(parts_at):
    chance = random.Random(5)
    one = [chance.gauss(0, 0.1) for _ in range(200)]
    other = [chance.gauss(0, 0.1) + (0.5 if step + 1 >= parts_at else 0.0) for step in range(200)]
    found = first_divergence(series(one), series(other))
    assert found is not None
    assert abs(found - parts_at) <= 10  # the width of a window


def test_runs_that_do_not_part():
    chance = random.Random(5)
    noise = [[series([chance.gauss(0, 1) for _ in range(100)]) for _ in range(2)] for _ in range(300)]
    assert sum(first_divergence(*pair) is not None for pair in noise) <= 3
    assert first_divergence(series([1.0] * 50), series([1.0] * 50)) is None
    assert first_divergence(series([1.0]), series([2.0])) is None


def test_seeds_of_one_configuration_are_put_together_and_other_runs_not():
    runs = [named(f"s{seed}", settings={"trainer.seed": seed}) for seed in (1, 2, 3)]
    other = named("other", settings={"trainer.seed": 4, "actor_rollout_ref.actor.optim.lr": 1e-3})
    text = comparison_panel([*runs, other])
    assert "3 seeds of one configuration: s1, s2, s3" in text
    assert "seeds of one configuration" not in comparison_panel([runs[0], other])


def test_runs_with_equal_seeds_are_compared_in_pairs():
    rewards = {1: 0.2, 2: 0.6, 3: 0.4}
    gains = {1: 0.01, 2: 0.02, 3: 0.03}
    first = [
        named(f"a{seed}", {"critic/score/mean": [rewards[seed]] * STEPS}, {"trainer.seed": seed})
        for seed in rewards
    ]
    second = [
        named(
            f"b{seed}",
            {"critic/score/mean": [rewards[seed] + gains[seed]] * STEPS},
            {"trainer.seed": seed, "x.y": 1},
        )
        for seed in (3, 1, 2)
    ]
    text = comparison_panel([*first, *second])
    assert "3 pairs of equal seeds: b1, b2, b3 less a1, a2, a3" in text
    # Mean 0.02, deviation 0.01 of the differences: 2.920 * 0.01 / sqrt(3) is half the interval. Seeds alone
    # spread by 0.2.
    assert "<td>critic/score/mean</td><td>0.02 ± 0.01686</td><td>higher</td>" in text
    assert "<td>actor/entropy</td><td>0 ± 0</td><td>not told apart</td>" in text


def test_seeds_that_only_one_side_has_are_no_pairs():
    first = [named(f"a{seed}", settings={"trainer.seed": seed}) for seed in (1, 2)]
    second = [named(f"b{seed}", settings={"trainer.seed": seed, "x.y": 1}) for seed in (2, 3)]
    assert "pairs of equal seeds" not in comparison_panel([*first, *second])


def test_keys_that_differ_and_only_those():
    text = comparison_panel(
        [named("a", settings={"x.y": 1, "same": 2}), named("b", settings={"x.y": 3, "same": 2, "new": 4})]
    )
    assert "<td>x.y</td><td>1</td><td>3</td>" in text
    assert "<td>new</td><td>(absent)</td><td>4</td>" in text
    assert "<td>same</td>" not in text


def test_no_significance_is_claimed_from_one_run_a_side():
    assert "no difference is shown to be more than chance" in comparison_panel([named("a"), named("b")])


def test_all_runs_are_on_one_scale_in_one_chart():
    runs = [
        named("a", {"actor/grad_norm": wave(1.0)}),
        named("b", {"actor/grad_norm": wave(100.0)}),
        named("c"),
    ]
    charts = {chart.title: chart for chart in charts_of(PANELS["learning"][1], runs)}
    assert [line.label for line in charts["Gradient norm"].lines] == [
        f"{name}: actor/grad_norm" for name in "abc"
    ]
    assert [line.run for line in charts["Gradient norm"].lines] == [0, 1, 2]  # one colour a run
    clipped = charts["Clipped tokens"].lines
    assert [(line.run, line.part) for line in clipped] == [(0, 0), (1, 0), (2, 0)]
    assert not [chart for chart in charts_of(PANELS["time"][1], runs) if chart.stacked]


def test_a_page_of_runs_that_share_nothing():
    runs = [named("a"), named("b")]
    runs[0].series = {"critic/score/mean": series([1.0] * STEPS)}
    runs[1].series = {"actor/grad_norm": series([1.0] * 3)}
    assert "Comparison" in build_page(runs, [judge(run) for run in runs])
