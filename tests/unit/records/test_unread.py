"""Arguments that a chat template does not mention are found."""

from typing import Any

import pytest

from verl_rc.records.unread import unread_arguments


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("{% if enable_thinking %}a{% endif %}", ["enable"]),
        ("{{ messages }}", ["enable_thinking", "enable"]),
        ({"default": "x", "tool_use": "{{ enable_thinking }}"}, ["enable"]),
    ],
)
def test_arguments_that_no_template_mentions_are_named(template: Any, unread: list[str]) -> None:
    assert unread_arguments(template, {"enable_thinking": False, "enable": 1}) == unread
