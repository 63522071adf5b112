"""Walking a schema: leaves, sections, mappings whose keys are the user's, defaults."""

import pytest
from pydantic import BaseModel

from verl_rc.config.schema import default_at, defaults, has_key, known_keys, leads_to_leaf, needed_below


class Inner(BaseModel):
    size: int = 3
    path: str
    free: dict[str, int] | None = None


class Outer(BaseModel):
    inner: Inner
    name: str = "x"


def test_leaves_and_defaults() -> None:
    assert list(known_keys(Outer)) == ["inner.size", "inner.path", "inner.free", "name"]
    assert defaults(Outer) == {"inner": {"size": 3, "free": None}, "name": "x"}
    assert (default_at(Outer, ["inner", "size"]), default_at(Outer, ["inner", "path"]), default_at(Outer, ["no"])) == (
        3,
        None,
        None,
    )


def test_what_must_be_given() -> None:
    assert needed_below(Outer, ["inner"]) == ["inner.path"]
    assert needed_below(Outer, ["inner", "path"]) == ["inner.path"]


@pytest.mark.parametrize(
    ("key", "known", "is_leaf"),
    [
        ("name", True, True), ("inner", True, False), ("inner.size", True, True), ("inner.free.a.b", True, True),
        ("inner.size.x", False, True), ("outer", False, True), ("inner.sise", False, True), ("", False, True),
    ],
)  # fmt: skip
def test_keys(key: str, known: bool, is_leaf: bool) -> None:
    assert has_key(Outer, key) == known
    assert leads_to_leaf(Outer, key) == is_leaf
