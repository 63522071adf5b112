"""Python files of the user as modules of this one: their names hold their paths.

So every process that can import this package imports such a module by its name, also one that the user's code
starts: pickle, dataclasses, pydantic and ``typing.get_type_hints`` find it.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []  # only a module with a path may have modules of its own; ``_Finder`` finds them

_versions: dict[str, tuple[int, int]] = {}
"""Time of change, ns, and size of the file of each module, when it was imported."""


def import_file(file: Path) -> ModuleType:
    """The module of an existing Python file. It runs once in a process, and again when the file has
    changed."""
    path = file.expanduser().absolute()
    name = f"{__name__}.{_encoded(str(path))}"
    stat = path.stat()
    version = stat.st_mtime_ns, stat.st_size
    if _versions.get(name, version) != version:
        sys.modules.pop(name, None)
    _versions[name] = version
    return importlib.import_module(name)


def _encoded(path: str) -> str:
    """``path`` as an identifier; ``_decoded`` reverses it."""
    return re.sub("[^0-9a-zA-Z]", lambda character: f"_{ord(character[0]):x}_", path)


def _decoded(name: str) -> str:
    return re.sub("_([0-9a-f]{1,6})_", lambda code: chr(int(code[1], 16)), name)


class _Finder(MetaPathFinder):
    """Finds the file that the name of a module holds."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See ``MetaPathFinder``."""
        parent, _, name = fullname.rpartition(".")
        if parent != __name__:
            return None
        file = Path(_decoded(name))
        return importlib.util.spec_from_file_location(fullname, file) if file.is_absolute() else None


sys.meta_path.append(_Finder())
