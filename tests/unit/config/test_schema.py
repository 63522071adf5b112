"""Sections are frozen, closed and checked; walking their tree finds leaves, free mappings and defaults."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from verl_rc.config.schema import (
    StrictModel,
    UserPath,
    default_at,
    fields_of,
    has_key,
    is_section,
    required_leaves,
    set_value,
    value_at,
)


class Section(StrictModel):
    size: int = Field(3, ge=1)
    """A documented field."""


def test_sections_are_frozen_closed_and_documented() -> None:
    assert Section.model_fields["size"].description == "A documented field."
    with pytest.raises(ValidationError, match="frozen"):
        Section().size = 4  # type: ignore[misc]
    with pytest.raises(ValidationError, match="Extra inputs"):
        Section.model_validate({"sise": 4})
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Section(size=0)


class Place(StrictModel):
    folder: UserPath
    share: float = 0.5


def test_numbers_are_finite() -> None:
    for share in (float("nan"), float("inf")):
        with pytest.raises(ValidationError, match="finite number"):
            Place(folder="x", share=share)


def test_a_path_is_that_of_whoever_starts_the_run() -> None:
    assert Place(folder="~/runs/a").folder == str(Path.home() / "runs" / "a")
    assert Place(folder="org/model").folder == "org/model"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "must not be empty"),
        (" ", "must not be empty"),
        ("a\0b", "NUL"),
        ("a/" + "b" * 300, "at most 255 bytes"),
        ("~nobody-at-all/x", "a user with a home"),
    ],
)
def test_a_path_that_is_none_is_refused(path: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Place(folder=path)


class Inner(BaseModel):
    size: int = 3
    path: str
    free: dict[str, int] | None = None


class Outer(BaseModel):
    inner: Inner
    name: str = "x"


def test_leaves_and_defaults() -> None:
    assert list(fields_of(Outer)) == ["inner.size", "inner.path", "inner.free", "name"]
    keys = ("inner.size", "inner.size.0", "inner.path", "no")
    assert [default_at(Outer, key) for key in keys] == [3, 3, None, None]


def test_a_value_is_set_and_read_by_its_dotted_key() -> None:
    tree: dict[str, Any] = {"inner": {"size": 1}, "name": "x"}
    set_value(tree, "inner.path", "a")
    set_value(tree, "other.size", 2)
    set_value(tree, "name.size", 3)  # a section of a wrong type stays, for validation to name
    assert tree == {"inner": {"size": 1, "path": "a"}, "name": "x", "other": {"size": 2}}
    assert [value_at(tree, key) for key in ("inner.path", "inner.no", "name.size")] == ["a", None, None]


def test_what_must_be_given() -> None:
    assert required_leaves(Outer, "inner") == ["inner.path"]
    assert required_leaves(Outer, "inner.path") == ["inner.path"]


@pytest.mark.parametrize(
    ("key", "known", "is_a_section"),
    [
        ("name", True, False),
        ("inner", True, True),
        ("inner.size", True, False),
        ("inner.free.a.b", True, False),
        ("inner.size.x", False, False),
        ("outer", False, False),
        ("inner.sise", False, False),
        ("", False, False),
    ],
)
def test_keys(key: str, known: bool, is_a_section: bool) -> None:
    assert has_key(Outer, key) == known
    assert is_section(Outer, key) == is_a_section
