"""Exact match: blanks at the ends do not count, everything else does."""

import pytest

from verl_rc.rewards.scorers import exact_match


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("0123", "0123", 1.0),
        (" 0123\n", "0123", 1.0),
        ("0123", " 0123 ", 1.0),
        ("12", 12, 1.0),
        ("01 23", "0123", 0.0),
        ("123", "0123", 0.0),
        ("", "0123", 0.0),
        ("01234", "0123", 0.0),
    ],
)
def test_score(response, truth, score):
    assert exact_match(response, truth) == {"score": score, "acc": score, "pred": response.strip()}
