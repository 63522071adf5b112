"""Metrics of a step that its token records tell."""

import math
import random
from typing import Any

import pytest

from verl_rc.insight.run_folder.token_metrics import metrics_of
from verl_rc.records.token_records.token_rows import record_of_rows


def test_log_probs_that_are_not_finite_or_far_apart_have_their_shares() -> None:
    """Of four sampled tokens one is not finite and one is 30 nats apart."""
    row = {
        "response_mask": [1, 1, 1, 1, 0],
        "rollout_log_prob": [-1.0, math.nan, -1.0, -1.0, math.nan],
        "old_log_prob": [-1.0, -1.0, -31.0, -1.0, -1.0],
    }
    metrics = metrics_of(record_of_rows({}, 1, [row]))
    assert metrics["rollout_corr/nonfinite_token_fraction"] == 0.25
    assert metrics["rollout_corr/safety_clamped_fraction"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("facts", "youngest"), [({}, 0), ({"current_version": None}, 0), ({"current_version": 9}, 2)]
)
def test_the_gap_by_age(facts: dict[str, int | None], youngest: int) -> None:
    """k3 of ±0.1 is e^±0.1 - 1 ∓ 0.1."""
    rows = [
        {"response_mask": [1], "rollout_log_prob": [-1.0], "old_log_prob": [-1.0 + gap], "version": version}
        for gap, version in ((0.1, 7), (-0.1, 7), (0.0, 4))
    ]
    metrics = metrics_of(record_of_rows(facts, 10, rows))
    expected = (math.expm1(0.1) - 0.1 + math.expm1(-0.1) + 0.1) / 2
    assert metrics[f"rollout_corr/age_{youngest}_k3_kl"] == pytest.approx(expected, rel=1e-5)
    assert metrics[f"rollout_corr/age_{youngest + 3}_k3_kl"] == 0.0
    assert metrics["rollout_corr/token_age_mean"] == pytest.approx(youngest + 1)


def test_means_are_those_of_rows_that_were_drawn_at_random() -> None:
    """Not of the worst rows, and without an entropy that is not finite."""
    row = {"response_mask": [1, 1], "rollout_log_prob": [-1.0, -1.0], "score": 1.0, "chosen_by": "random"}
    worst = {"response_mask": [1], "rollout_log_prob": [-9.0], "score": 0.0, "chosen_by": "worst"}
    rows = [row | {"entropy": [0.5, math.nan]}, worst | {"entropy": [7.0]}]
    metrics = metrics_of(record_of_rows({}, 1, rows))
    assert metrics["response_length/mean"] == 2.0
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["actor/entropy"] == 0.5


def test_entropies_none_of_which_is_a_number_are_not_known() -> None:
    row = {"response_mask": [1], "rollout_log_prob": [-1.0], "entropy": [math.nan]}
    assert "actor/entropy" not in metrics_of(record_of_rows({}, 1, [row]))


def noisy(prompts: int, samples: int, seed: int) -> list[dict[str, Any]]:
    """Rows of one token, whose log-probs and log-ratios have nothing to do with each other or the prompt."""
    chance = random.Random(seed)
    rows = []
    for index in range(prompts * samples):
        log_prob = -1.0 - chance.expovariate(1.0)
        rows.append(
            {
                "prompt_ids": [index // samples],
                "response_ids": [index],
                "response_mask": [1],
                "old_log_prob": [log_prob],
                "rollout_log_prob": [log_prob - chance.gauss(0.0, 0.1)],
                "chosen_by": "random",
            }
        )
    return rows


def behind_prefixes(rows: list[dict[str, Any]]) -> dict[str, float]:
    metrics = metrics_of(record_of_rows({}, 1, rows))
    return {name: value for name, value in metrics.items() if name.startswith("rollout_corr/prefix_")}


@pytest.mark.parametrize("samples", [2, 8])
def test_of_noise_all_is_spread_behind_prefixes_however_many_share_one(samples: int) -> None:
    assert behind_prefixes(noisy(800, samples, 0))["rollout_corr/prefix_spread"] == pytest.approx(1, abs=0.1)


def test_tokens_that_stand_alone_behind_their_prefix_do_not_count() -> None:
    """Beside none, a worst row, or one without a finite log-prob."""
    rows = noisy(100, 2, 0)
    alone = noisy(300, 1, 1)
    for index, row in enumerate(alone):
        row["prompt_ids"] = [1000 + index]
    worst = [row | {"chosen_by": "worst"} for row in alone[100:200]]
    missing = [row | {"rollout_log_prob": [math.nan]} for row in alone[200:]]
    assert behind_prefixes([*rows, *alone, *worst, *missing]) == pytest.approx(behind_prefixes(rows))
