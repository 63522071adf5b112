"""Modules with the names, the signatures and the version of another trainer; nothing of its code."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, package: str, version: str, modules: dict[str, str]
) -> None:
    """Put a package into ``folder``, which can be imported until the test ends.

    Args:
        monkeypatch: undoes it.
        folder: of the test.
        package: its name, and that of its distribution.
        version: that is said to be installed.
        modules: text by dotted name.
    """
    about = folder / f"{package}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    for name, text in modules.items():
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in file.relative_to(folder).parents:
            if parent.name:
                (folder / parent / "__init__.py").touch()
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))


def imported(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Import a module, and forget it and its parents when the test ends."""
    module = importlib.import_module(name)
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        part = ".".join(parts[:length])
        monkeypatch.setitem(sys.modules, part, sys.modules[part])
    return module
