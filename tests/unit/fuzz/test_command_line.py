"""The real command with random mistakes: exit status 2, one message, no traceback, and the run's folder as it
was."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzed_overrides import mistyped, typed
from sound_run import sound_run

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config

ROOT = Path(__file__).parents[3]


def refused(seed: int) -> list[str]:
    """Random overrides that a run refuses; every third time the data files alone are missing."""
    rng = random.Random(seed)
    while seed % 3:
        overrides = [*sound_run(), *rng.choice([typed, mistyped])(rng)]
        overrides = [override for override in overrides if "\0" not in override and "\ud800" not in override]
        try:
            load_run_config(overrides)
        except ConfigError:
            return overrides
    return sound_run()


def start(overrides: list[str], folder: Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "verl_rc.main_ppo", f"trainer.default_local_dir={folder}", *overrides]
    return subprocess.Popen(
        command, env=environment, cwd=folder.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 15), marks=pytest.mark.chaos)], ids=str)
def test_mistakes_end_in_one_message_and_leave_no_trace(seeds: range, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "metrics.jsonl").write_text("{}\n")
    folders = [tmp_path / ("before" if seed % 2 else "new") for seed in seeds]
    running = [start(refused(seed), folder) for seed, folder in zip(seeds, folders, strict=True)]
    for process in running:
        printed, message = process.communicate(timeout=600)
        assert process.returncode == 2, message
        assert message.startswith("configuration error:\n")
        assert "Traceback" not in message
        assert printed == ""
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")) == [
        "before",
        "before/metrics.jsonl",
    ]
    assert (tmp_path / "before" / "metrics.jsonl").read_text() == "{}\n"
