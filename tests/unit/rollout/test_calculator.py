"""Arithmetic: the numbers of Python's own evaluation, and refusal of everything that is no arithmetic or too large."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.rollout.tools import CALCULATOR, ToolError, evaluate_expression

NUMBERS = st.integers(0, 999).map(str)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " - ", "//", "%"]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-{}".format),
    ),
    max_leaves=8,
)


@given(EXPRESSIONS)
def test_whole_numbers_agree_with_python(expression: str) -> None:
    try:
        expected = str(eval(expression))
    except ZeroDivisionError:
        expected = None
    if len(expression) > 200:
        return
    if expected is None:
        with pytest.raises(ToolError, match="division by zero"):
            evaluate_expression(expression)
    else:
        assert evaluate_expression(expression) == expected


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" 12 + 3*4 ", "24"),
        ("0.1+0.2", "0.3"),
        ("10/4", "2.5"),
        ("9/3", "3"),
        ("1/3", "0.3333333333"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("(-2)**3", "-8"),
        ("-2**2", "-4"),
        ("7//2*2+7%2", "7"),
        ("1**64", "1"),
        ("0**5", "0"),
        ("2.5e3", "2500"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert evaluate_expression(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["", "  ", "1+", "x", "1 2", "print(1)", "__import__('os')", "'a'*3", "[1]", "1 if 1 else 2", "True+1", "1<2", "1j", "~1",
     "1|2", "1<<9", "(lambda: 1)()", "f'{1}'", "1,2", "...", "None", "a.b", "½+1", "7\x00", "(" * 150, "007", "x:=1", "1 and 2"],
)  # fmt: skip
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ToolError, match="not an arithmetic expression"):
        evaluate_expression(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1" * 201, "at most 200 characters"),
        ("9" * 150, "too large"),
        ("99**64", "too large"),
        ("2**2**2**2**2**2", "too large|whole number of at most 64"),
        ("9**9**9**9", "whole number of at most 64"),
        ("2**65", "whole number of at most 64"),
        ("4**0.5", "whole number"),
        ("2**-65", "whole number"),
        ("0**-1", "division by zero"),
        ("1/(2-2)", "division by zero"),
        ("1%0", "division by zero"),
        ("1e999", "too large"),
        ("1e300*1e300", "too large"),
        ("*".join(["99999"] * 33), "too large"),
        ("1e-300", "too large"),
    ],
)
def test_what_is_too_large_is_refused_at_once(expression: str, message: str) -> None:
    started = time.perf_counter()
    with pytest.raises(ToolError, match=message):
        evaluate_expression(expression)
    assert time.perf_counter() - started < 60  # 9**9**9**9 in full would take years


def test_the_tool_answers_and_explains() -> None:
    assert CALCULATOR.call({"expression": "1+1"}) == "2"
    assert CALCULATOR.call({"expression": "1/0"}) == "error: division by zero"
