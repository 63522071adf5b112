"""Size budgets: lines of a file and of a function, number of arguments."""

import ast

import pytest
from architecture.source_tree import functions, listed, package_files, parse, relative

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
MAX_LOOP_LINES = 80
MAX_ARGUMENTS = 7
PUBLIC_BY_DESIGN = {
    "compute_advantages",
    "compute_policy_loss",
    "compute_rollout_correction",
    "compute_value_loss",
}
"""Called from notebooks and other trainers with keyword arguments; a record would make that clumsy."""
SIGNATURE_OF_ANOTHER_LIBRARY = {"packed_sdpa"}
"""Called by transformers, which decides the arguments."""


def oversized_functions(tree: ast.AST, path: str) -> list[str]:
    violations = []
    for function in functions(tree):
        lines = function.end_lineno - function.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            violations.append(
                f"{path}:{function.lineno} {function.name} has {lines} lines, at most {MAX_FUNCTION_LINES}"
            )
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        count = sum(argument.arg not in ("self", "cls") for argument in arguments)
        if count > MAX_ARGUMENTS and function.name not in PUBLIC_BY_DESIGN | SIGNATURE_OF_ANOTHER_LIBRARY:
            violations.append(
                f"{path}:{function.lineno} {function.name} takes {count} arguments, at most {MAX_ARGUMENTS}"
            )
    return violations


def test_files_fit():
    sizes = {relative(path): len(path.read_text().splitlines()) for path in package_files()}
    too_long = [
        f"{path} has {lines} lines, at most {MAX_FILE_LINES}"
        for path, lines in sizes.items()
        if lines > MAX_FILE_LINES
    ]
    assert not too_long, listed(too_long)


def test_functions_fit():
    violations = [v for path in package_files() for v in oversized_functions(parse(path), relative(path))]
    assert not violations, listed(violations)


def test_the_loop_fits_on_a_page():
    path = next(path for path in package_files("trainer") if path.name == "train.py")
    loop = next(function for function in functions(parse(path)) if function.name == "train")
    assert loop.end_lineno - loop.lineno + 1 <= MAX_LOOP_LINES


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("def f(a, b, c, d, e, f, *, g): ...", 0),
        ("def f(self, a, b, c, d, e, f, *, g): ...", 0),
        ("def f(a, b, c, d, e, f, *, g, h): ...", 1),
        ("def compute_value_loss(a, b, c, d, e, f, g, h): ...", 0),
        ("def f():\n" + "    x = 1\n" * 99, 0),
        ("def f():\n" + "    x = 1\n" * 100, 1),
        ("class A:\n    async def f(self):\n" + "        x = 1\n" * 100, 1),
    ],
)
def test_the_check_itself(code, count):
    assert len(oversized_functions(ast.parse(code), "planted.py")) == count
