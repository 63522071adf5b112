"""Numbers about the house and what they may be, a column each: python scripts/measure_code.py [CHECKOUT ...]

Only the standard library is needed, so that an older checkout can be measured without installing it.
"""

import argparse
import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

BUDGETS = {
    "statements of the package": 20_500,
    "statements that a run can reach": 16_000,
    "statements of correction": 550,
    "rooms of the package": 11,
    "configuration keys": 260,
    "metrics": 200,
    "words of documents": 48_000,
    "lines of scripts": 4_500,
    "lines of tests for 100 of the package": 125,
}
"""What a change that adds something has to stay below, or to say why not."""
_RUN = ("verl_rc.main_ppo", "verl_rc.main_sft")
_ENGINES = "verl_rc.runtime.rollout.vllm"  # processes load them by name
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Package:
    """The Python files of one package, parsed once."""

    def __init__(self, folder: Path) -> None:
        """Read every file below ``folder``."""
        self.folder = folder
        self.texts = {path: path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}

    @property
    def sizes(self) -> list[int]:
        """Lines of each file."""
        return [len(text.splitlines()) for text in self.texts.values()]

    @property
    def function_sizes(self) -> list[int]:
        """Lines of each function, docstrings included."""
        return [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for tree in self.trees.values()
            for node in ast.walk(tree)
            if isinstance(node, _FUNCTIONS)
        ]

    @property
    def rooms(self) -> int:
        """Folders at the top."""
        parts = (path.relative_to(self.folder).parts for path in self.texts)
        return len({first for first, *rest in parts if rest})

    def statements(self, paths: Iterable[Path] | None = None) -> int:
        """Statements of ``paths`` (of all files by default); docstrings and other constants are none."""
        return sum(
            isinstance(node, ast.stmt)
            and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for path in (self.texts if paths is None else paths)
            for node in ast.walk(self.trees[path])
        )

    @cached_property
    def modules(self) -> dict[str, Path]:
        """Files by the name that imports give them."""
        names = {path: path.relative_to(self.folder.parent).with_suffix("") for path in self.texts}
        return {".".join(name.parts).removesuffix(".__init__"): path for path, name in names.items()}

    def reached(self, starts: Iterable[str]) -> set[Path]:
        """Files that the modules ``starts`` import, directly or not, and their own."""
        seen: set[str] = set()
        waiting = [name for name in starts if name in self.modules]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += _imported(self.trees[self.modules[name]]) & self.modules.keys()
        return {self.modules[name] for name in seen}


def _imported(tree: ast.Module) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _names_below(page: Path, header: str) -> int:
    """Names in the first cells of all tables of a page that begin with ``header``."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    tables = re.findall(rf"^\| {re.escape(header)} \|.*\n\|[- |]+\n((?:\|.*\n)*)", text, re.MULTILINE)
    return sum(row.split(" | ")[0].count("`") // 2 for rows in tables for row in rows.splitlines())


def _lines(folder: Path) -> int:
    return sum(
        len(path.read_text(encoding="utf-8").splitlines())
        for path in folder.rglob("*")
        if path.suffix in (".py", ".sh")
    )


def house(checkout: Path) -> dict[str, int]:
    """The numbers that have a budget."""
    package = Package(checkout / "verl_rc")
    engines = [name for name in package.modules if name.startswith(_ENGINES)]
    pages = [*checkout.glob("*.md"), *(checkout / "docs").rglob("*.md")]
    return {
        "statements of the package": package.statements(),
        "statements that a run can reach": package.statements(package.reached([*_RUN, *engines])),
        "statements of correction": Package(checkout / "verl_rc" / "correction").statements(),
        "rooms of the package": package.rooms,
        "configuration keys": _names_below(checkout / "docs/configuration.md", "key"),
        "metrics": _names_below(checkout / "docs/metrics.md", "Name"),
        "words of documents": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "lines of scripts": _lines(checkout / "scripts"),
        "lines of tests for 100 of the package": 100 * _lines(checkout / "tests") // sum(package.sizes),
    }


def style(checkout: Path) -> dict[str, str]:
    """Sizes of files and functions, and what an addition of each kind touches."""
    package = Package(checkout / "verl_rc")
    functions = package.function_sizes
    rows = {
        "files": str(len(package.sizes)),
        "lines of a file: median, largest": f"{statistics.median(package.sizes):.0f}, {max(package.sizes)}",
        "lines of a function: median, largest": f"{statistics.median(functions):.0f}, {max(functions)}",
    }
    patches = patched_files(checkout)
    return rows | {f"files of CONTRIBUTING's patch: {kind}": str(count) for kind, count in patches.items()}


def patched_files(checkout: Path) -> Counter[str]:
    """Files that each patch of CONTRIBUTING.md touches; empty for a checkout that has none."""
    page = checkout / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    patches = re.findall(
        r"^### Add an? ([^\n]+)\n(?:(?!^##).)*?^```diff\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    return Counter({kind: patch.count("\n+++ ") for kind, patch in patches})


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description="Numbers about the house and what they may be, a column for each checkout."
    )
    parser.add_argument(
        "checkouts", metavar="CHECKOUT", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]]
    )
    checkouts = parser.parse_args().checkouts
    houses, styles = [house(checkout) for checkout in checkouts], [style(checkout) for checkout in checkouts]
    print("| what | at most |" + " |" * len(checkouts) + "\n|---|---|" + "---|" * len(checkouts))
    for name, most in BUDGETS.items():
        cells = (f"{column[name]:,}{'' if column[name] <= most else ' (over)'}" for column in houses)
        print(f"| {name} | {most:,} | {' | '.join(cells)} |")
    for name in dict.fromkeys(name for column in styles for name in column):
        print(f"| {name} | | {' | '.join(column.get(name, '-') for column in styles)} |")


if __name__ == "__main__":
    main()
