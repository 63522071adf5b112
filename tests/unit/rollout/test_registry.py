"""Tools by name: built in, or the user's own."""

import sys
from pathlib import Path

import pytest

from verl_rc.rollout.tools import CALCULATOR, find_tools

SOURCE = """
from verl_rc.rollout.tools import Tool
SHOUT = Tool("shout", "Shouts.", {"text": "what"}, lambda text: text.upper())
TWIN = Tool("calculator", "Another.", {}, lambda: "")
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
        (f"{own_module}:NONE", "must be a verl_rc.rollout.tools.Tool, got None"),
        ("no_such_module:X", "cannot be imported"),
    ):
        with pytest.raises(ValueError, match=message):
            find_tools([name])
    with pytest.raises(ValueError, match="different names, got two 'calculator'"):
        find_tools(["calculator", f"{own_module}:TWIN"])
