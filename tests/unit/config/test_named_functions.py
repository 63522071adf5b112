"""Functions by name: built in, registered, under another name, or imported."""

from collections.abc import Callable

import pytest

from verl_rc.config.user_code import NamedFunctions


def double(number: int) -> int:
    return 2 * number


@pytest.fixture
def functions() -> NamedFunctions[Callable[[int], int]]:
    functions: NamedFunctions[Callable[[int], int]] = NamedFunctions("number function", "section.key", {"twice": "double"})
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
        ("nowhere_at_all:f", "the number function 'nowhere_at_all:f' must name a function in an importable module"),
        ("operator:nothing", "the number function 'operator:nothing' must name a function in an importable module"),
    ],
)
def test_what_is_not_there_is_named(functions: NamedFunctions[Callable[[int], int]], name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        functions.resolve(name)
