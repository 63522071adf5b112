"""Tools: what they answer, the calculator's arithmetic, one that fails or hangs is named, and finding them by
name."""

import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.runtime.rollout.tools import (
    CALCULATOR,
    Tool,
    ToolError,
    ToolFailedError,
    call_tool,
    evaluate_expression,
    find_tools,
)


def joined(left: str, right: str) -> str:
    if left == right:
        raise ToolError("both are the same")
    if left == "broken":
        raise KeyError(left)
    return left + right


TOOL = Tool("join", "Joins two texts.", {"left": "first", "right": "second"}, joined)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"left": "a", "right": "b"}, "ab"),
        ({"left": "a", "right": "a"}, "error: both are the same"),
        ({"left": "a"}, 'error: join takes ["left", "right"], got ["left"]'),
        ({"left": "a", "right": 1}, "error: arguments must be texts, right is not"),
    ],
)
def test_answers(arguments: dict[str, object], text: str) -> None:
    assert TOOL.call(arguments) == text


def test_a_defect_of_the_tool_itself_is_no_answer() -> None:
    with pytest.raises(KeyError):
        TOOL.call({"left": "broken", "right": "b"})


def test_the_schema_is_openais_function_format() -> None:
    function = TOOL.schema()["function"]
    assert TOOL.schema()["type"] == "function"
    assert function["name"] == "join"
    assert function["parameters"] == {
        "type": "object",
        "properties": {
            "left": {"type": "string", "description": "first"},
            "right": {"type": "string", "description": "second"},
        },
        "required": ["left", "right"],
    }


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
    [
        "",
        "  ",
        "1+",
        "x",
        "1 2",
        "print(1)",
        "__import__('os')",
        "'a'*3",
        "[1]",
        "1 if 1 else 2",
        "True+1",
        "1<2",
        "1j",
        "~1",
        "1|2",
        "1<<9",
        "(lambda: 1)()",
        "f'{1}'",
        "1,2",
        "...",
        "None",
        "a.b",
        "½+1",
        "7\x00",
        "(" * 150,
        "007",
        "x:=1",
        "1 and 2",
    ],
)
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


def behave(how: str) -> str:
    match how:
        case "refuse":
            raise ToolError("not today")
        case "break":
            raise KeyError(how)
        case "leave":
            raise SystemExit(0)
        case "hang":
            time.sleep(60)
        case "number":
            return 7  # type: ignore[return-value]
    return threading.current_thread().name


SLOW_TOOL = Tool("odd", "Does as it is told.", {"how": "what"}, behave)


def test_answers_come_from_a_thread_that_is_not_the_callers() -> None:
    assert call_tool(SLOW_TOOL, {"how": "answer"}, 600) == "tools"
    assert call_tool(SLOW_TOOL, {"how": "refuse"}, 600) == "error: not today"
    assert call_tool(SLOW_TOOL, {}, 600) == 'error: odd takes ["how"], got []'


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("break", r"raised KeyError\('break'\)\. A tool must raise"),
        ("leave", r"raised SystemExit\(0\)"),
        ("number", "must return a text, got 7"),
        ("hang", r"must answer within .*multi_turn.tool_timeout_seconds=0.2, and is still at work"),
    ],
)
def test_a_failure_names_the_tool_and_its_call(how: str, message: str) -> None:
    with pytest.raises(
        ToolFailedError,
        match=f"the tool 'odd' of .*multi_turn.tools, called with {{'how': '{how}'}}, {message}",
    ):
        call_tool(SLOW_TOOL, {"how": how}, 0.2 if how == "hang" else 600)


SOURCE = """
from verl_rc.runtime.rollout.tools import Tool
SHOUT = Tool("shout", "Shouts.", {"text": "what"}, lambda text: text.upper())
TWIN = Tool("calculator", "Another.", {}, lambda: "")
async def wait(text): return text
WAIT = Tool("wait", "Waits.", {"text": "what"}, wait)
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_tools_of_a_test.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_tools_of_a_test", raising=False)
    return "own_tools_of_a_test"


def test_found_by_name_in_their_order(own_module: str) -> None:
    tools = find_tools([f"{own_module}:SHOUT", "calculator"])
    assert list(tools) == ["shout", "calculator"]
    assert tools["calculator"] is CALCULATOR
    assert tools["shout"].call({"text": "a"}) == "A"


def test_what_cannot_be_found_is_named(own_module: str) -> None:
    for name, message in (
        ("calculater", "got 'calculater'; the nearest is calculator"),
        (f"{own_module}:NONE", "has no attribute 'NONE'"),
        (f"{own_module}:Tool", "must be a verl_rc.runtime.rollout.tools.Tool, got"),
        (f"{own_module}:WAIT", "must have a function that returns its answer, got an `async def`"),
        ("no_such_module:X", "must name a tool in an importable module"),
    ):
        with pytest.raises(ValueError, match=message):
            find_tools([name])
    with pytest.raises(ValueError, match="different names, got two 'calculator'"):
        find_tools(["calculator", f"{own_module}:TWIN"])
