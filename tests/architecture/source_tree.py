"""What the architecture tests look at: the project's files, parsed once."""

import ast
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "verl_rc"
PURE_PACKAGES = ("algorithm", "correction", "records", "tensor_ops")
TEXT_SUFFIXES = {
    ".cfg",
    ".cpu",
    ".gpu",
    ".ini",
    ".json",
    ".md",
    ".py",
    ".sh",
    ".toml",
    ".txt",
    ".yaml",
    ".yml",
    "",
}


def package_files(*packages: str) -> list[Path]:
    """Python files of the whole package, or of the packages named."""
    folders = [PACKAGE / package for package in packages] or [PACKAGE]
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def project_files() -> tuple[Path, ...]:
    """Everything that git tracks or would track."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        paths = [ROOT / name for name in result.stdout.split("\0") if name]
    else:  # an unpacked archive, without git
        hidden = {
            ".venv",
            ".git",
            "__pycache__",
            ".mypy_cache",
            ".ruff_cache",
            ".pytest_cache",
            "outputs",
            "runs",
            "wandb",
        }
        paths = [path for path in ROOT.rglob("*") if not hidden & set(path.relative_to(ROOT).parts)]
    return tuple(sorted(path for path in paths if path.is_file() and path.suffix in TEXT_SUFFIXES))


def texts(*suffixes: str) -> Iterator[tuple[str, str]]:
    """``(path from the root, text)`` of the project's files with one of these suffixes, or of all text
    files."""
    for path in project_files():
        if not suffixes or path.suffix in suffixes:
            yield relative(path), path.read_text(encoding="utf-8")


def relative(path: Path) -> str:
    """The path as people write it, from the root of the repository."""
    return path.relative_to(ROOT).as_posix()


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of a tree, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def listed(violations: list[str]) -> str:
    """A failure message with one violation a line."""
    return f"{len(violations)} violation(s):\n" + "\n".join(violations)
