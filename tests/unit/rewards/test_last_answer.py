"""Only the last turn is judged."""

import pytest

from verl_rc.rewards.scorers import last_answer


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<tool>1+2</tool>3=3", 1.0),
        ("3", 1.0),
        (" 3 ", 1.0),
        ("<tool>1+2</tool>3=4", 0.0),
        ("<tool>1+2</tool>3=", 0.0),
        ("3=<tool>1+2</tool>", 0.0),
        ("<tool>1+2</tool>", 0.0),
        ("", 0.0),
    ],
)
def test_scores(text: str, right: float) -> None:
    output = last_answer(text, "3")
    assert (output["score"], output["acc"]) == (right, right)
