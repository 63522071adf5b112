"""Code of the user's own: functions that are built in, registered, under another name or imported; and Python
files."""

from collections.abc import Callable
from pathlib import Path

import pytest

from verl_rc.config.user_code import NamedFunctions, load_user_module


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def functions() -> NamedFunctions[Callable[[int], int]]:
    functions: NamedFunctions[Callable[[int], int]] = NamedFunctions(
        "number function", "section.key", {"twice": "double"}
    )
    functions.register("double")(double)
    return functions


def test_every_way_to_a_function(functions: NamedFunctions[Callable[[int], int]]) -> None:
    register = functions.register("square")
    square = register(lambda number: number**2)
    assert register(square) is square
    assert functions.names() == ("double", "square", "twice")
    assert [functions.resolve(name)(3) for name in functions.names()] == [6, 9, 6]
    assert functions.resolve("operator:neg")(3) == -3


@pytest.mark.parametrize("taken", ["double", "twice"])
def test_a_name_is_taken_once(functions: NamedFunctions[Callable[[int], int]], taken: str) -> None:
    with pytest.raises(ValueError, match=f"the number function '{taken}' is registered already"):
        functions.register(taken)(abs)
    assert functions.resolve(taken) is double


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tripple", "section.key must be one of double, twice, or 'module:function'; got 'tripple'"),
        (
            "nowhere_at_all:f",
            "the number function 'nowhere_at_all:f' must name a function in an importable module",
        ),
        (
            "operator:nothing",
            "the number function 'operator:nothing' must name a function in an importable module",
        ),
    ],
)
def test_what_is_not_there_is_named(
    functions: NamedFunctions[Callable[[int], int]], name: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        functions.resolve(name)


def test_a_file_becomes_a_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("answer = 6 * 7\n")
    assert load_user_module(str(tmp_path / "mine.py"), "a.path").answer == 42


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("absent.py", None, "a.path must be an existing Python file, got"),
        ("mine.txt", "answer = 1", "a.path must be an existing Python file, got"),
        ("mine.py", "1 / 0", r"a.path must be a file that can be imported; .* raised ZeroDivisionError"),
        ("mine.py", "def (", r"a.path must be a file that can be imported; .* raised SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        load_user_module(str(tmp_path / name), "a.path")


def test_a_module_that_leaves_when_it_is_imported_is_named(tmp_path):
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")
    with pytest.raises(
        ValueError,
        match=r"data.custom_cls.path must be a file that can be imported; .* raised SystemExit\(0\)",
    ):
        load_user_module(str(tmp_path / "leaves.py"), "data.custom_cls.path")
