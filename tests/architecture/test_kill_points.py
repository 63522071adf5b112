"""The functions at which tests stop a run, written as ``module:name``, exist: most of these tests are run by
hand, so a renamed function would be found long afterwards."""

import ast
import pkgutil
import re
from pathlib import Path

TESTS = Path(__file__).parent.parent
PLACE = re.compile(r"verl_rc(\.\w+)+:[A-Za-z_][\w.]*")


def texts(tree: ast.Module) -> set[str]:
    """Texts of a file, those with an f-string's ``{CONSTANT}`` with the constant's text."""
    constants: dict[str, str] = {}

    def text(node: ast.AST) -> str:
        match node:
            case ast.Constant(str(value)):
                return value
            case ast.FormattedValue(ast.Name(name)):
                return constants.get(name, "?")
            case ast.JoinedStr(parts):
                return "".join(map(text, parts))
            case _:
                return "?"

    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], value):
                constants[name] = text(value)
            case ast.Assign([ast.Tuple(names)], ast.Tuple(values)):
                constants |= {name.id: text(value) for name, value in zip(names, values, strict=True)}
    return {text(node) for node in ast.walk(tree)}


def test_the_functions_at_which_a_run_is_stopped_exist() -> None:
    files = (path for folder in ("chaos", "integration") for path in sorted((TESTS / folder).glob("*.py")))
    places = {
        place for path in files for place in texts(ast.parse(path.read_text())) if PLACE.fullmatch(place)
    }
    assert len(places) > 20
    for place in sorted(places):
        pkgutil.resolve_name(place)
