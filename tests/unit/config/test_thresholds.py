"""Thresholds: every accepted form, and every refusal with the key, what must hold and what was given."""

import pytest

from verl_rc.config.thresholds import Threshold, parse_threshold, threshold_specs


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
