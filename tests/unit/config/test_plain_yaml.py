"""YAML of somebody else takes time and memory by its length."""

import datetime
from typing import Any

import pytest
import yaml

from verl_rc.config.plain_yaml import LARGEST, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1\nb: [x, 2.5, null, true]\n", {"a": 1, "b": ["x", 2.5, None, True]}),
        ("", None),
        ("a: '*b'\nc: x * y\nd: \"&e\"", {"a": "*b", "c": "x * y", "d": "&e"}),
        ("a: &b 1", {"a": 1}),  # nothing stands for it
        ("t: 12:30:45\nd: 2026-11-29", {"t": 45045, "d": datetime.date(2026, 11, 29)}),
        (f"a: {'b:c ' * 500}", {"a": ("b:c " * 500).strip()}),
        (f"a: {'1' * 500}", {"a": int("1" * 500)}),
    ],
)
def test_plain_values_are_read_as_yaml_reads_them(text: str, value: Any) -> None:
    assert load_yaml(text) == value == yaml.safe_load(text)


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, r"without aliases, but it has \*a0"),
        ("a: &a [*a]", "without aliases"),
        ("base: &base {x: 1}\nmine:\n  <<: *base", "without aliases"),
        ("[" * 101 + "]" * 101, "at most 100 levels"),
        ("- " * 101 + "x", "at most 100 levels"),
        ("a: 1" + ":1" * 40, "a number must have at most 64 characters"),
        ("a: !!int '1" + ":1" * 40 + "'", "a number must have"),
        ('a: !!float "1' + ":1" * 40 + '"', "a number must have"),
        ("a: +1" + ":1" * 40 + ".5", "a number must have"),
        ("#" * (LARGEST + 1), "at most 1,048,576 characters"),
    ],
)
def test_what_unfolds_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_yaml(text)


@pytest.mark.parametrize(
    "text", ["a: !!python/object/apply:os.system ['true']", "!!python/name:os.system", "a: ["]
)
def test_types_and_damage_are_yaml_s_own_errors(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        load_yaml(text)


def test_ninety_nine_levels_are_none_too_many() -> None:
    value = load_yaml("[" * 99 + "]" * 99)
    for _ in range(98):
        (value,) = value
    assert value == []
