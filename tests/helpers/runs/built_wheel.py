"""The wheel of this tree, and environments that it is installed into."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from small_runs import ROOT

_BUILD = "import setuptools.build_meta as backend; print(backend.build_wheel('dist'))"


def build_wheel(folder: Path) -> Path:
    """Build the wheel below ``folder``; returns its path."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "verl_rc", source / "verl_rc", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "dist").mkdir()
    ran([sys.executable, "-c", _BUILD], source)
    (wheel,) = (source / "dist").glob("*.whl")
    return wheel


def ran(command: Sequence[object], folder: Path, status: int = 0) -> str:
    """What a command says that must end with ``status``; it sees none of this process's packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, (result.stdout + result.stderr)[-2000:]
    return result.stdout + result.stderr


class Environment:
    """A virtual environment of its own, with ``packages`` in it."""

    def __init__(self, folder: Path, packages: Sequence[str] = (), python: str = sys.executable) -> None:
        self._folder = folder
        ran([python, "-m", "venv", "--without-pip", folder / "venv"], folder)
        if packages:
            self.pip("install", "--quiet", *packages)

    def pip(self, *arguments: object) -> str:
        """What pip says."""
        pip = [sys.executable, "-m", "pip", "--python", self._folder / "venv/bin/python"]
        return ran([*pip, "--disable-pip-version-check", *arguments], self._folder)

    def run(self, *arguments: object, status: int = 0) -> str:
        """What the environment's Python says."""
        return ran([self._folder / "venv/bin/python", *arguments], self._folder, status)

    def tool(self, *arguments: object, status: int = 0) -> str:
        """What ``verl-rc`` says."""
        return ran([self._folder / "venv/bin/verl-rc", *arguments], self._folder, status)

    def moved_by(self, wheel: Path) -> list[str]:
        """Distributions that are there and that the wheel's installation would replace."""
        there = {one["name"].lower() for one in json.loads(self.pip("list", "--format=json"))}
        report = self._folder / "report.json"
        self.pip("install", "--quiet", "--dry-run", "--report", report, wheel)
        added = json.loads(report.read_text())["install"]
        return sorted(there & {one["metadata"]["name"].lower() for one in added})
