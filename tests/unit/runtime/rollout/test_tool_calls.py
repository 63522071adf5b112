"""Calls in a policy's text, the answers it reads, and how long answers are cut."""

import pytest

from verl_rc.config.rollout import MultiTurnConfig
from verl_rc.runtime.rollout.tool_environment import (
    ToolCall,
    answer_call,
    choose_parser,
    parse_hermes,
    tag_parser,
    truncate_text,
)
from verl_rc.runtime.rollout.tools import CALCULATOR, Tool

TOOLS = {"calculator": CALCULATOR}


def test_hermes_calls_in_order() -> None:
    text = (
        'I add.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+2"}}\n</tool_call>'
        '<tool_call>{"name": "other", "arguments": {}}</tool_call><tool_call>{"name": '
    )
    assert parse_hermes(text) == [ToolCall("calculator", {"expression": "1+2"}), ToolCall("other", {})]
    assert parse_hermes("no call </tool_call>") == []


@pytest.mark.parametrize(
    "body", ["1+2", "[]", '{"name": 3, "arguments": {}}', '{"name": "calculator", "arguments": "1+2"}', ""]
)
def test_a_malformed_call_is_answered(body: str) -> None:
    (call,) = parse_hermes(f"<tool_call>{body}</tool_call>")
    assert isinstance(call, str)
    assert answer_call(call, TOOLS, 5).startswith("error: a tool call must be")


def test_tags_hold_the_one_argument() -> None:
    parse = tag_parser(CALCULATOR)
    assert parse("<tool>1+2</tool> and <tool>3</tool>") == [
        ToolCall("calculator", {"expression": "1+2"}),
        ToolCall("calculator", {"expression": "3"}),
    ]
    assert parse("<tool>1+2</tool") == []


def test_answers() -> None:
    assert answer_call(ToolCall("calculator", {"expression": "6*7"}), TOOLS, 5) == "42"
    assert answer_call(ToolCall("calculater", {}), TOOLS, 5) == 'error: the tools are ["calculator"]'


def test_the_format_chooses_the_parser_and_must_fit_the_tools() -> None:
    assert choose_parser(MultiTurnConfig(), TOOLS) is parse_hermes
    assert choose_parser(MultiTurnConfig(format="tag"), TOOLS)("<tool>1</tool>") == [
        ToolCall("calculator", {"expression": "1"})
    ]
    two = Tool("two", "", {"a": "", "b": ""}, lambda a, b: a + b)
    for tools in ({}, {"two": two}, {"two": two, **TOOLS}):
        with pytest.raises(ValueError, match="format=tag needs one tool with one argument"):
            choose_parser(MultiTurnConfig(format="tag"), tools)


@pytest.mark.parametrize(
    ("limit", "side", "text"),
    [
        (10, "left", "0123456789"),
        (4, "left", "(truncated)...6789"),
        (4, "right", "0123...(truncated)"),
        (5, "middle", "012...(truncated)...89"),
        (1, "middle", "0...(truncated)..."),
        (1, "left", "(truncated)...9"),
    ],
)
def test_long_answers_are_cut(limit: int, side: str, text: str) -> None:
    assert truncate_text("0123456789", limit, side) == text
