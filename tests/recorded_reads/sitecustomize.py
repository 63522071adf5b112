"""Writes down which keys of a run's configuration are read, and by which modules, in every process of the
run.

Python imports this by itself where ``PYTHONPATH`` names its folder; ``RECORDED_READS`` names the folder to
write to: a file a process, a line ``key module`` for each read that is new. Loading and checking a
configuration, and printing it, are no reads.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

SCHEMA = "verl_rc.config.schema"
NO_READERS = (
    "verl_rc.config.load",
    "verl_rc.config.checks",
    "verl_rc.config.paths",
    "verl_rc.insight",
    "verl_rc.plan",
    "verl_rc.cli",
    "verl_rc.main_ppo",
)


class Recorder:
    """The attribute reads of all sections in this process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.written: set[str] = set()
        self.paths: dict[int, tuple[Any, str]] = {}
        """Sections by their ids, kept alive so that no other object gets one, and where they lie in the tree.
        """

    def read(self, section: Any, name: str, value: Any, frame: FrameType | None) -> None:
        """Note that ``section.name`` was read in ``frame``."""
        reader = reader_of(frame)
        path = self.path_of(section) if reader is not None and name in type(section).model_fields else None
        if path is None:
            return
        if hasattr(type(value), "model_fields"):
            self.paths[id(value)] = (value, f"{path}{name}.")
            return
        line = f"{path}{name} {reader}"
        if line not in self.written:
            self.written.add(line)
            with open(os.path.join(self.folder, str(os.getpid())), "a", encoding="utf-8") as file:
                file.write(f"{line}\n")

    def path_of(self, section: Any) -> str | None:
        """Where a section lies: by what it was read from, else the one place that its class has."""
        if id(section) not in self.paths:
            places = self.places(sys.modules["verl_rc.config.run"].RunConfig, type(section), "")
            self.paths[id(section)] = (section, places[0] if len(places) == 1 else "")
        path = self.paths[id(section)][1]
        return path if path or type(section).__name__ == "RunConfig" else None

    def places(self, schema: Any, kind: type, prefix: str) -> list[str]:
        """Prefixes of all sections of class ``kind``."""
        found = []
        for name, field in schema.model_fields.items():
            if hasattr(field.annotation, "model_fields"):
                found += [f"{prefix}{name}."] if field.annotation is kind else []
                found += self.places(field.annotation, kind, f"{prefix}{name}.")
        return found


def reader_of(frame: FrameType | None) -> str | None:
    """The module of the package on whose behalf a key is read; None where nothing is done with it."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(NO_READERS):
            return None
        if not module.startswith(("verl_rc.config", "pydantic", __name__)):
            return module if module.startswith("verl_rc.") else None
        frame = frame.f_back
    return None


class Patched(PathFinder):
    """Finds the schema as ever, and lets its sections record."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target) if fullname == SCHEMA else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            recorder = Recorder(os.environ["RECORDED_READS"])

            def get(self: Any, name: str) -> Any:
                value = object.__getattribute__(self, name)
                if not name.startswith("_"):
                    recorder.read(self, name, value, sys._getframe(1))
                return value

            module.StrictModel.__getattribute__ = get

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if "RECORDED_READS" in os.environ:
    sys.meta_path.insert(0, Patched)
