"""HARDWARE=1gpu: the same path with the GPU build, refused before the download where there is no GPU."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from verl_rc.config.load import load_run_config

ROOT = Path(__file__).parents[3]
RECORDS = """#!/usr/bin/env bash
echo "$(basename "$0")" "HARDWARE=$HARDWARE" "NUM_HEADS=${NUM_HEADS:-}" "$@" >>"$RECORD"
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose other scripts write down that they were called."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "recipes").mkdir()
    shutil.copy(ROOT / "scripts" / "quickstart.sh", tmp_path / "scripts")
    for name in ("scripts/install.sh", "scripts/warm_start.sh", "recipes/quickstart_digits_cpu.sh"):
        (tmp_path / name).write_text(RECORDS)
    return tmp_path


def quickstart(
    checkout: Path, gpus: str, *overrides: str, **variables: str
) -> tuple[int, str, list[list[str]]]:
    """Exit status, errors and calls on a machine whose ``nvidia-smi`` prints ``gpus``."""
    smi = checkout / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(f"#!/usr/bin/env bash\nprintf '%s' '{gpus}'\n")
    smi.chmod(0o755)
    record = checkout / "record"
    environment = {"PATH": f"{smi.parent}:{os.environ['PATH']}", "RECORD": str(record), **variables}
    command = ["bash", str(checkout / "scripts" / "quickstart.sh"), *overrides]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    calls = [line.split() for line in record.read_text().splitlines()] if record.exists() else []
    return ended.returncode, ended.stderr, calls


def test_one_gpu(checkout: Path) -> None:
    status, _, calls = quickstart(checkout, "NVIDIA H200", "trainer.seed=3", HARDWARE="1gpu")
    assert status == 0
    settings = ["HARDWARE=1gpu", "NUM_HEADS=6"]
    assert calls == [
        ["install.sh", *settings, "gpu"],
        ["warm_start.sh", *settings],
        ["quickstart_digits_cpu.sh", *settings, "trainer.seed=3"],
    ]


def test_a_cpu(checkout: Path) -> None:
    status, _, calls = quickstart(checkout, "")
    assert (status, calls[0]) == (0, ["install.sh", "HARDWARE=cpu", "NUM_HEADS=", "cpu"])


@pytest.mark.parametrize(
    ("hardware", "reason"), [("1gpu", "nvidia-smi shows none"), ("8gpu", "must be cpu or 1gpu, got 8gpu")]
)
def test_what_cannot_be_is_refused_before_the_download(checkout: Path, hardware: str, reason: str) -> None:
    status, errors, calls = quickstart(checkout, "", HARDWARE=hardware)
    assert (status, calls) == (2, [])
    assert reason in errors


def test_the_recipe_on_one_gpu_asks_for_a_device_and_for_nothing_that_only_a_cpu_has(tmp_path: Path) -> None:
    record = tmp_path / "python"
    record.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "${@:3}"\n')
    record.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(record), "HARDWARE": "1gpu"}
    recipe = ROOT / "recipes" / "quickstart_digits_cpu.sh"
    printed = subprocess.run(
        ["bash", str(recipe)], env=environment, capture_output=True, text=True, check=True
    )
    config = load_run_config(printed.stdout.splitlines())
    assert (config.trainer.device, config.actor_rollout_ref.rollout.quantization) == ("cuda", None)
    assert config.actor_rollout_ref.rollout.dtype == "bfloat16"
