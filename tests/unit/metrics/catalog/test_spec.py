"""How catalogue entries recognise names."""

import pytest

from verl_rc.metrics.catalog.spec import MetricSpec, spread


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("actor/lr", "actor/lr", True),
        ("actor/lr", "actor/lrs", False),
        ("perf/mfu/{role}", "perf/mfu/actor", True),
        ("perf/mfu/{role}", "perf/mfu/actor/extra", False),
        ("val-core/{data_source}/acc/mean@{n}", "val-core/openai/gsm8k/acc/mean@16", True),
        ("val-core/{data_source}/acc/mean@{n}", "val-core/openai/gsm8k/acc/mean@many", False),
        ("rollout_corr/rollout_rs_{rule}_max", "rollout_corr/rollout_rs_seq_mean_k1_max", True),
        ("rollout_corr/rollout_rs_{rule}_max", "rollout_corr/rollout_rs_/_max", False),
        ("a.b", "aXb", False),
    ],
)
def test_matches(pattern, name, matches):
    assert MetricSpec(pattern, "1", "").matches(name) is matches


def test_spread_has_one_entry_a_statistic():
    specs = spread("critic/score", "reward", "sequences of the score", "ppo")
    assert [spec.name for spec in specs] == ["critic/score/mean", "critic/score/max", "critic/score/min"]
    assert specs[1].formula == "largest over sequences of the score"


@pytest.mark.parametrize(
    ("healthy", "words"),
    [
        (None, ""),
        ((None, None), ""),
        ((None, 0.1), "≤ 0.1"),
        ((0.5, None), "≥ 0.5"),
        ((0, 0), "0"),
        ((0.5, 1.0), "0.5 to 1"),
    ],
)
def test_healthy_ranges_in_words(healthy, words):
    assert MetricSpec("a/b", "1", "", healthy=healthy).healthy_in_words == words
