"""Whole runs in processes of their own, disturbed on request, and what they leave behind."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from small_runs import HELPERS, ROOT

_MARKER = "VERL_RC_TEST_CHILD"
"""Environment variable that everything a run starts inherits."""


def marked_environment() -> dict[str, str]:
    """What a run is started with, so that its processes can be told from others."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), HELPERS, os.environ.get("PYTHONPATH", ""))),
        _MARKER: str(os.getpid()),
    }


def train(
    overrides: Sequence[str], *disturbances: str, reads: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    """One run as a user starts it, with the words of ``disturbed_run.py``, if any.

    With a folder for ``reads``, its processes write there which keys of the configuration they read
    (tests/recorded_reads).
    """
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "faults" / "disturbed_run.py"), *disturbances, "--", *overrides]
    environment = marked_environment()
    if reads is not None:
        path = os.pathsep.join((environment["PYTHONPATH"], str(ROOT / "tests" / "recorded_reads")))
        environment.update(PYTHONPATH=path, RECORDED_READS=str(reads))
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def of_folder(folder: Path) -> list[str]:
    """Overrides of where a run writes to."""
    return [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder / 'rollouts'}"]


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """The last line of ``metrics.jsonl`` for every step."""
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines}


def left_over_processes(patience_seconds: float = 120.0) -> list[str]:
    """Processes that a run started and did not take with it; on a busy machine the last ones need a moment to
    die."""
    deadline = time.monotonic() + patience_seconds
    while (found := _marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.5)
    return found


def marked_memory() -> int:
    """Bytes that all processes of a run hold together; what several of them share counts once."""
    total = 0
    for folder in _marked_folders():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
            (line,) = [
                line for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:")
            ]
            total += int(line.split()[1]) << 10
    return total


def _marked_processes() -> list[str]:
    found = []
    for folder in _marked_folders():
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


def _marked_folders() -> Iterator[Path]:
    marker = f"{_MARKER}={os.getpid()}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            if marker in (folder / "environ").read_bytes().split(b"\0"):
                yield folder
