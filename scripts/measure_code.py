"""Code metrics of the package, a column for each checkout: python scripts/measure_code.py [CHECKOUT ...]

Only the standard library is needed, so that an older checkout can be measured without installing it.
"""

import argparse
import ast
import io
import re
import statistics
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

ADDITIONS = {
    "policy loss": "sapo",
    "advantage estimator": "reinforce_plus_plus_baseline",
    "rejection rule": "kpop",
    "metric": "response_length/clip_ratio",
    "stage": "dump_rollout_generations",
    "engine": "vllm",
    "environment": "Gym",
}
"""One of each kind: the files that name it are the places that another one has to touch."""
COMMENTED = ("correction", "losses", "weight_sync", "rollout", "workers")
"""Packages whose comments are counted by themselves."""
_WINDOW, _WINDOW_CHARACTERS = 8, 120


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
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [
            (node.end_lineno or node.lineno) - node.lineno + 1
            for node in self.nodes()
            if isinstance(node, kinds)
        ]

    def nodes(self) -> Iterator[ast.AST]:
        """All syntax nodes."""
        return (node for tree in self.trees.values() for node in ast.walk(tree))

    @cached_property
    def num_comments(self) -> int:
        """Comments; docstrings are none."""
        readers = (io.StringIO(text).readline for text in self.texts.values())
        return sum(
            token.type == tokenize.COMMENT for reader in readers for token in tokenize.generate_tokens(reader)
        )

    @property
    def comments_per_100_lines(self) -> float:
        """How much is commented."""
        return 100 * self.num_comments / max(1, sum(self.sizes))

    @property
    def string_subscripts(self) -> int:
        """``x["a"]`` and ``x[f"…"]``, those in annotations left out."""
        return sum(
            isinstance(node, ast.Subscript)
            and (isinstance(node.slice, ast.JoinedStr) or isinstance(getattr(node.slice, "value", None), str))
            and not (isinstance(node.value, ast.Name) and node.value.id[:1].isupper())
            for node in self.nodes()
        )

    @property
    def broad_excepts(self) -> int:
        """``except:``, ``except Exception`` and ``except BaseException``."""
        handlers = (node for node in self.nodes() if isinstance(node, ast.ExceptHandler))
        return sum(
            node.type is None or ast.unparse(node.type) in ("Exception", "BaseException") for node in handlers
        )

    def files_that_name(self, name: str) -> list[Path]:
        """Files that contain ``name`` as a word."""
        word = re.compile(rf"(?<![\w/]){re.escape(name)}(?![\w/])")
        return [path for path, text in self.texts.items() if word.search(text)]

    @property
    def repeated_percent(self) -> float:
        """Percentage of code lines inside a window of eight lines that occurs twice; no docstrings, comments
        or imports."""
        places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
        total = 0
        for path, tree in self.trees.items():
            lines = _code_lines(self.texts[path], tree)
            total += len(lines)
            for start in range(len(lines) - _WINDOW + 1):
                window = tuple(lines[start : start + _WINDOW])
                if sum(map(len, window)) >= _WINDOW_CHARACTERS:
                    places[window].append((path, start))
        repeated = {
            (path, start + offset)
            for windows in places.values()
            if len(windows) > 1
            for path, start in windows
            for offset in range(_WINDOW)
        }
        return 100 * len(repeated) / max(1, total)

    @property
    def import_chain(self) -> int:
        """Modules on the longest way down through imports inside the package."""
        names = {
            path: ".".join(path.relative_to(self.folder.parents[1]).with_suffix("").parts)
            for path in self.trees
        }
        modules = {
            name.removesuffix(".__init__"): path
            for path, name in names.items()
            if not name.endswith("__init__")
        }
        below = {module: _imported(self.trees[path], modules) - {module} for module, path in modules.items()}
        return max((_longest(module, below, ()) for module in below), default=0)


def _code_lines(text: str, tree: ast.Module) -> list[str]:
    skipped: set[int] = set()
    for node in ast.walk(tree):
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        if documented and ast.get_docstring(node):
            skipped.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, (node.end_lineno or 0) + 1))
    lines = (
        re.sub(r"\s+#.*$", "", line).strip()
        for number, line in enumerate(text.splitlines(), 1)
        if number not in skipped
    )
    return [line for line in lines if line and not line.startswith("#")]


def _imported(tree: ast.Module, modules: Iterable[str]) -> set[str]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    named = {node.module for node in imports} | {
        f"{node.module}.{alias.name}" for node in imports for alias in node.names
    }
    return named & set(modules)


def _longest(module: str, below: dict[str, set[str]], above: tuple[str, ...]) -> int:
    return 1 + max(
        (_longest(other, below, (*above, module)) for other in below[module] if other not in above), default=0
    )


def measure(checkout: Path) -> dict[str, str]:
    """Every number of one checkout, in words."""
    root = checkout / "verl_rc"
    whole, correction = Package(root), Package(root / "correction")
    functions = sorted(whole.function_sizes)
    rows = {
        "files": f"{len(whole.sizes):,}",
        "lines": f"{sum(whole.sizes):,}",
        "lines of a file: median, largest": f"{statistics.median(whole.sizes):.0f}, {max(whole.sizes)}",
        "lines of a function: median, p90, largest": f"{statistics.median(functions):.0f}, "
        f"{functions[int(0.9 * len(functions))]}, {functions[-1]}",
        "repeated lines": f"{whole.repeated_percent:.1f} %",
        "broad excepts": str(whole.broad_excepts),
        "string subscripts": str(whole.string_subscripts),
        "correction: files, lines": f"{len(correction.sizes)}, {sum(correction.sizes):,}",
        "correction: longest chain of imports": str(correction.import_chain),
        "correction: string subscripts": str(correction.string_subscripts),
    }
    patches = patched_files(checkout)
    for kind, name in ADDITIONS.items():
        rows[f"files that name the {kind} {name}"] = str(len(whole.files_that_name(name)))
        rows[f"files of CONTRIBUTING's patch: {kind}"] = str(patches[kind]) if kind in patches else "-"
    for package in COMMENTED:
        rows[f"comments in 100 lines: {package}"] = f"{Package(root / package).comments_per_100_lines:.1f}"
    return rows


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
        description="Numbers about the package's house, a column for each checkout."
    )
    parser.add_argument(
        "checkouts", metavar="CHECKOUT", nargs="*", type=Path, default=[Path(__file__).resolve().parents[1]]
    )
    columns = [measure(checkout) for checkout in parser.parse_args().checkouts]
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f"| {name} | {' | '.join(column.get(name, '-') for column in columns)} |")


if __name__ == "__main__":
    main()
