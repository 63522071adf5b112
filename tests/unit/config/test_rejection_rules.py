"""The rules by name."""

import pytest

from verl_rc.config.rejection_rules import REJECTION_RULES, parse_rules


def test_verls_eleven_come_first_and_there_is_no_seq_max_k1() -> None:
    of_log_ratios = [name for name, rule in REJECTION_RULES.items() if rule.divergence in ("k1", "k2", "k3")]
    assert list(REJECTION_RULES)[:11] == of_log_ratios
    assert "seq_max_k1" not in REJECTION_RULES
    assert all(name == rule.name for name, rule in REJECTION_RULES.items())


def test_duplicates_are_dropped_and_order_is_kept() -> None:
    names = [rule.name for rule in parse_rules("seq_mean_k3, token_k1,seq_mean_k3", "key")]
    assert names == ["seq_mean_k3", "token_k1"]


@pytest.mark.parametrize(
    ("given", "nearest"), [("token", "token_k1"), ("geometric", "seq_mean_k1"), ("seq_men_k3", "seq_mean_k3")]
)
def test_an_unknown_rule_names_the_nearest(given: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"use {nearest}"):
        parse_rules(given, "key")


def test_only_k1_thresholds_are_bounds_on_the_ratio() -> None:
    assert {rule.divergence for rule in REJECTION_RULES.values() if rule.bounds_ratio} == {"k1"}
    assert {name for name, rule in REJECTION_RULES.items() if rule.is_per_token} == {
        name for name in REJECTION_RULES if name.startswith("token_")
    }
