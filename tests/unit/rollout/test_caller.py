"""A tool that fails or hangs ends in a message that names it; answers and refused calls come through."""

import threading
import time

import pytest

from verl_rc.rollout.tools import Tool, ToolCaller, ToolError, ToolFailedError


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


TOOL = Tool("odd", "Does as it is told.", {"how": "what"}, behave)


def test_answers_come_from_one_thread_that_is_not_the_callers() -> None:
    caller = ToolCaller(600)
    assert [caller.call(TOOL, {"how": "answer"}) for _ in range(3)] == ["tools"] * 3
    assert caller.call(TOOL, {"how": "refuse"}) == "error: not today"
    assert caller.call(TOOL, {}) == 'error: odd takes ["how"], got []'


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
    with pytest.raises(ToolFailedError, match=f"the tool 'odd' of .*multi_turn.tools, called with {{'how': '{how}'}}, {message}"):
        ToolCaller(0.2 if how == "hang" else 600).call(TOOL, {"how": how})
