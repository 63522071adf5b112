"""Kept results of a track: which method, on which machine, with which versions."""

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from verl_rc import __version__
from verl_rc.bench.standing import Result, settings


def record_results(folder: Path, results: Mapping[str, Result]) -> Path:
    """Put results into ``folder/exact.json``; those of the same methods are replaced.

    Raises ``ValueError`` where the file has results of other conditions.
    """
    file = folder / "exact.json"
    entries = read_results(file) if file.is_file() else {}
    entries |= {name: {**result.as_json(), **_origin()} for name, result in results.items()}
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"settings": settings(), "methods": dict(sorted(entries.items()))}
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def read_results(file: Path) -> dict[str, Any]:
    """Entries by method. Raises ``ValueError`` for results of other conditions than today's."""
    kept = json.loads(file.read_text(encoding="utf-8"))
    today = settings()
    if changed := [name for name in today if kept["settings"].get(name) != today[name]]:
        raise ValueError(
            f"{file} must hold results of today's conditions; {', '.join(changed)} differ: move it away, or "
            "write to another folder"
        )
    methods: dict[str, Any] = kept["methods"]
    return methods


def commit() -> str | None:
    """The commit of this checkout; None: an installed package."""
    root = Path(__file__).resolve().parents[2]
    if shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
    # A package that is installed below somebody's own checkout is at no commit of that one.
    return output[1] if Path(output[0]) == root else None


def _origin() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = {"verl_rc": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {
        "machine": f"{platform.machine()} with {torch.backends.cpu.get_cpu_capability()}, {cores} cores",
        "versions": versions,
        "commit": commit(),
    }
