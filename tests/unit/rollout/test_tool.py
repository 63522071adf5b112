"""A tool answers calls that fit it and says what is wrong with others."""

import pytest

from verl_rc.rollout.tools import Tool, ToolError


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
