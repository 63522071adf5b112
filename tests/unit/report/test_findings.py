"""A failed finding says what must hold, what was found and what to do; the others say what was found."""

import pytest

from verl_rc.report.preflight_machine import Finding, verdict


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (True, ["ok    cores: 2"]),
        (False, ["FAIL  cores: 2", "        must  4 cores must be there", "        do    ask for less"]),
    ],
)
def test_a_condition_that_holds_or_not(holds: bool, expected: list[str]) -> None:
    assert Finding.of(holds, "cores", "2", "4 cores must be there", "ask for less").lines() == expected


def test_a_note_is_one_line() -> None:
    assert Finding("note", "data", "not looked at").lines() == ["note  data: not looked at"]


def test_the_verdict_counts() -> None:
    assert verdict(0) == "The run can start."
    assert "2 thing(s)" in verdict(2)
