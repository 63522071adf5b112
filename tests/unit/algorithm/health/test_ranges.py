"""Metrics outside their healthy range: after how many steps, how often again, in which words."""

import math

import pytest

from verl_rc.algorithm.health.ranges import HealthHistory, range_warnings
from verl_rc.metrics.bounds import PLAUSIBLE_NOISE

ESS = "rollout_corr/rollout_is_eff_sample_size"  # healthy from 0.5 to 1
NONFINITE = "rollout_corr/nonfinite_token_fraction"  # healthy at 0 alone


class Monitor:
    """A history that moves on with every step."""

    def __init__(self, **options):
        self.history, self.options = HealthHistory(), options

    def observe(self, metrics, step):
        before = self.history
        complaints, self.history = range_warnings(metrics, step, before, **self.options)
        assert range_warnings(metrics, step, before, **self.options) == (
            complaints,
            self.history,
        )  # the one before is as it was
        return complaints


def steps_of_complaints(monitor, name, values):
    return [step for step, value in enumerate(values, 1) if monitor.observe({name: value}, step)]


def test_a_metric_must_stay_outside_for_some_steps():
    assert steps_of_complaints(Monitor(patience=3), ESS, [0.4, 0.4, 0.9, 0.4, 0.4, 0.4]) == [6]


def test_a_step_without_the_metric_neither_counts_nor_forgives():
    monitor = Monitor(patience=2)
    assert not monitor.observe({ESS: 0.1}, 1)
    assert not monitor.observe({}, 2)
    (complaint,) = monitor.observe({ESS: 0.1}, 3)
    assert complaint.steps == 2


def test_it_is_said_again_only_after_the_quiet_steps():
    assert steps_of_complaints(Monitor(patience=1, quiet_steps=4), ESS, [0.1] * 10) == [1, 5, 9]


def test_recovering_does_not_end_the_quiet_steps():
    values = [0.1, 0.1, 0.9, 0.1, 0.1, 0.1]
    assert steps_of_complaints(Monitor(patience=2, quiet_steps=4), ESS, values) == [2, 6]


def test_what_must_be_0_is_said_at_once():
    assert steps_of_complaints(Monitor(), NONFINITE, [0.0, 1e-6]) == [2]


@pytest.mark.parametrize("value", [0.5, 1.0])
def test_the_ends_of_a_range_are_healthy(value):
    assert not Monitor(patience=1).observe({ESS: value}, 1)


@pytest.mark.parametrize("value", [0.4999, 1.0001, math.nan, -math.inf])
def test_outside_and_not_a_number_are_not(value):
    assert Monitor(patience=1).observe({ESS: value}, 1)


def test_other_metrics_and_those_without_a_range_are_left_alone():
    metrics = {"actor/pg_clipfrac": 0.9, "rollout_corr/chi2_seq": 1e9, "critic/vf_explained_var": -5.0}
    assert not Monitor(patience=1).observe(metrics, 1)


def test_the_noise_of_an_fp8_cache_is_no_fault_of_a_run():
    noise = PLAUSIBLE_NOISE["fp8_kv_cache"]
    metrics = {"rollout_corr/logit_noise": noise, "rollout_corr/logit_noise_floor": noise}
    assert not Monitor(patience=1).observe(metrics, 1)


def test_every_rule_is_watched_by_its_pattern():
    (complaint,) = Monitor(patience=1).observe(
        {"rollout_corr/rollout_rs_seq_mean_k1_masked_fraction": 0.5}, 1
    )
    assert str(complaint) == (
        "rollout_corr/rollout_rs_seq_mean_k1_masked_fraction = 0.5, healthy is 0 to 0.1 (this step): tokens "
        "that this rule rejects / tokens (opsm: response tokens)"
    )


def test_the_words_say_for_how_long():
    monitor = Monitor(patience=2)
    monitor.observe({NONFINITE: 0.0, ESS: 0.25}, 1)
    assert [str(c).split(": ")[0] for c in monitor.observe({ESS: 0.25, NONFINITE: 0.125}, 2)] == [
        f"{ESS} = 0.25, healthy is 0.5 to 1 (2 steps in a row)",
        f"{NONFINITE} = 0.125, healthy is 0 (this step)",
    ]
