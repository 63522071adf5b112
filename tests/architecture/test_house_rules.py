"""Habits that a linter does not know: what code of this project does not do."""

import ast
import re
from collections.abc import Callable

import pytest
from architecture.source_tree import PACKAGE, functions, listed, package_files, parse, relative

REFUSED_PACKAGE_NAMES = {"common", "core", "experimental", "helpers", "legacy", "misc", "util", "utils"}
Check = Callable[[ast.AST, str, str], list[str]]


def prints(tree: ast.AST, source: str, path: str) -> list[str]:
    """Output goes through a sink, a logger or an explicit stream."""
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        f"{path}:{call.lineno} print"
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "print"
    ]


def blind_excepts(tree: ast.AST, source: str, path: str) -> list[str]:
    """``except:`` and ``except Exception:`` hide bugs, unless they raise again, or send the error to the
    process that asked."""

    def names(node: ast.expr | None) -> set[str]:
        parts = node.elts if isinstance(node, ast.Tuple) else [node]
        return {"BaseException" if part is None else ast.unparse(part) for part in parts}

    handlers = (node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler))
    return [
        f"{path}:{handler.lineno} blind except"
        for handler in handlers
        if names(handler.type) & {"Exception", "BaseException"}
        and not any(
            isinstance(node, ast.Raise) or ast.unparse(node).startswith("pipe.send(")
            for node in ast.walk(handler)
        )
    ]


def config_lookups(tree: ast.AST, source: str, path: str) -> list[str]:
    """``config.get("key", default)`` gives a key a second default; fields are read as attributes."""
    violations = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
        ):
            owner = ast.unparse(node.func.value)
            if "config" in owner.rpartition(".")[2].lower() or owner.split(".")[0].lower() in (
                "config",
                "cfg",
            ):
                violations.append(f"{path}:{node.lineno} {owner}.get(")
    return violations


def unexplained_inner_imports(tree: ast.AST, source: str, path: str) -> list[str]:
    """An import inside a function says why, on its line or in a comment above; ``cli`` says it once for
    all."""
    if path.startswith("verl_rc/cli/"):
        return []
    lines = source.splitlines()

    def is_explained(line_number: int) -> bool:
        same = lines[line_number - 1].partition("#")[2].replace("noqa: PLC0415", "").strip(" #-:()")
        above = lines[line_number - 2].strip()
        return bool(same) or above.startswith("#")

    imports = {
        node.lineno
        for function in functions(tree)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    return [
        f"{path}:{line} import inside a function, without a reason"
        for line in sorted(imports)
        if not is_explained(line)
    ]


def missing_docstrings(tree: ast.AST, source: str, path: str) -> list[str]:
    """Modules, public classes and public functions say what they are."""
    violations = [] if ast.get_docstring(tree) else [f"{path}:1 module without a docstring"]
    scopes = [
        tree,
        *(node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")),
    ]
    for scope in scopes:
        for node in scope.body:
            if isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
            ) and not node.name.startswith("_"):
                overload = any(
                    "overload" in ast.unparse(decorator) for decorator in getattr(node, "decorator_list", [])
                )
                if not ast.get_docstring(node) and not overload:
                    violations.append(f"{path}:{node.lineno} {node.name} without a docstring")
    return violations


def other_dialects(tree: ast.AST, source: str, path: str) -> list[str]:
    """Docstrings have one dialect: double backticks, and a field's words below the field."""
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    single = re.compile(r"(?<!`)`[^`\n]+`(?!`)")
    return [
        f"{path}:{text.lineno} a docstring in another dialect"
        for text in texts
        if single.search(text.value) or re.search(r"^ *Attributes:$", text.value, re.MULTILINE)
    ]


EVERYWHERE: list[Check] = [
    other_dialects,
    prints,
    blind_excepts,
    config_lookups,
    unexplained_inner_imports,
    missing_docstrings,
]


@pytest.mark.parametrize("check", EVERYWHERE)
def test_whole_package(check: Check):
    violations = [v for path in package_files() for v in check(parse(path), path.read_text(), relative(path))]
    assert not violations, listed(violations)


def test_no_package_is_a_drawer():
    names = {path.stem for path in package_files()} | {
        path.name for path in PACKAGE.rglob("*") if path.is_dir()
    }
    assert not names & REFUSED_PACKAGE_NAMES


PLANTED = [
    (other_dialects, '"""Of `one`."""', 1),
    (other_dialects, '"""M.\n\n    Attributes:\n        x: a number.\n"""', 1),
    (other_dialects, '"""Of ``one``."""\nclass A:\n    x: int\n    """A number."""', 0),
    (prints, "print('x')", 1),
    (prints, "console.print('x')", 0),
    (blind_excepts, "try:\n    f()\nexcept Exception as error:\n    log(error)", 1),
    (blind_excepts, "try:\n    f()\nexcept:\n    pass", 1),
    (blind_excepts, "try:\n    f()\nexcept (OSError, Exception):\n    pass", 1),
    (blind_excepts, "try:\n    f()\nexcept Exception:\n    clean()\n    raise", 0),
    (blind_excepts, "try:\n    f()\nexcept Exception:\n    pipe.send(format_exc())", 0),
    (blind_excepts, "try:\n    f()\nexcept OSError:\n    pass", 0),
    (config_lookups, "config.get('a', 1)", 1),
    (config_lookups, "self.actor_config.get('a')", 1),
    (config_lookups, "config.actor.get('a')", 1),
    (config_lookups, "counts.get('a', 0)", 0),
    (config_lookups, "HydraConfig.get()", 0),
    (unexplained_inner_imports, "def f():\n    import ray  # noqa: PLC0415", 1),
    (unexplained_inner_imports, "def f():\n    import ray  # noqa: PLC0415  (takes 2 s)", 0),
    (unexplained_inner_imports, "def f():\n    # Takes 2 s.\n    import ray  # noqa: PLC0415", 0),
    (unexplained_inner_imports, "import ray", 0),
    (missing_docstrings, "x = 1", 1),
    (missing_docstrings, '"""M."""\ndef f(): ...\ndef _g(): ...', 1),
    (missing_docstrings, '"""M."""\nclass A:\n    """A."""\n    def f(self): ...', 1),
    (
        missing_docstrings,
        '"""M."""\nclass A:\n    """A."""\n    def f(self):\n        """F."""\n        def inner(): ...',
        0,
    ),
]


@pytest.mark.parametrize(("check", "code", "count"), PLANTED)
def test_the_checks_themselves(check: Check, code: str, count: int):
    assert len(check(ast.parse(code), code, "planted.py")) == count
