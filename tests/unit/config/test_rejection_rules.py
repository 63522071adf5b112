"""The rules by name, and thresholds: every accepted form, and every refusal with the key, what must hold and
what was given."""

import pytest

from verl_rc.config.rejection_rules import (
    REJECTION_RULES,
    Threshold,
    parse_rules,
    parse_threshold,
    threshold_specs,
)


def test_verls_eleven_come_first_and_there_is_no_seq_max_k1() -> None:
    of_log_ratios = [
        name
        for name, rule in REJECTION_RULES.items()
        if rule.divergence in ("k1", "k2", "k3") and not rule.scope.startswith("turn")
    ]
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
    assert {name for name, rule in REJECTION_RULES.items() if rule.rejects_rows} == {
        name for name in REJECTION_RULES if name.startswith("seq_")
    }


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2.0, Threshold(2.0)),
        (2, Threshold(2.0)),
        ("2.0", Threshold(2.0)),
        ("1e-3", Threshold(1e-3)),
        ("0.5_5.0", Threshold(5.0, 0.5)),
        ("0.5_5", Threshold(5.0, 0.5)),
        ({"lower": 0.5, "upper": 5}, Threshold(5.0, 0.5)),
        ({"upper": 5}, Threshold(5.0)),
        ([0.5, 5.0], Threshold(5.0, 0.5)),
    ],
)
def test_accepted_forms(value: object, expected: Threshold) -> None:
    assert parse_threshold(value, "key") == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "finite and > 0"),
        (float("inf"), "finite and > 0"),
        (0, "finite and > 0"),
        (-1.0, "finite and > 0"),
        ("5_0.5", "lower <= upper"),
        ("0_2", "finite and > 0"),
        (True, "key must be"),
        ("", "key must be"),
        ("a_b", "key must be"),
        ("1_2_3", "key must be"),
        ({"low": 1}, "must have upper"),
        ({"lower": 1}, "must have upper"),
        (None, "key must be"),
    ],
)
def test_refusals_name_the_key(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_threshold(value, "key")
    assert "key" in str(caught.value)


def test_a_missing_lower_bound_of_a_ratio_is_the_reciprocal() -> None:
    assert Threshold(2.0).reciprocal_lower == 0.5
    assert Threshold(2.0, 0.9).reciprocal_lower == 0.9


def test_several_thresholds_in_one_value() -> None:
    assert threshold_specs("0.5_2.0,0.01") == ["0.5_2.0", "0.01"]
    assert threshold_specs([1, "2_3"]) == [1, "2_3"]
    assert threshold_specs(0.5) == [0.5]
