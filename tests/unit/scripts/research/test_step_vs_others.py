"""The comparison with verl edits only the version that it was made for, and sees all processes of a run."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from research.bench import step_vs_others
from research.bench.step_vs_others import EDITS, StepTiming, accuracies, edit, memory_of


def stand_in(folder: Path) -> Path:
    """Files with the lines that are edited, as often as they must be there, and a line that must stay."""
    for change in EDITS:
        path = folder / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(change.old * change.count + "\nstays\n")
    return folder


def test_every_edit_is_made_and_the_platform_is_copied(tmp_path: Path) -> None:
    edit(stand_in(tmp_path))
    for change in EDITS:
        text = (tmp_path / change.path).read_text()
        assert text.count(change.new) >= change.count
        assert "stays" in text
    compile((tmp_path / "plugin/platform/platform_cpu.py").read_text(), "platform_cpu.py", "exec")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = stand_in(tmp_path) / "utils/distributed.py"
    path.write_text(path.read_text() + EDITS[1].old)
    with pytest.raises(SystemExit, match=r"utils/distributed.py of verl==0.9.1 must have 2 times .* got 3"):
        edit(tmp_path)


def test_the_memory_of_a_run_is_that_of_its_processes(tmp_path: Path) -> None:
    environment = {**os.environ, "STEP_VS_OTHERS": str(tmp_path)}
    program = "x = bytearray(64 << 20); x[::4096] = b'1' * len(x[::4096]); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (size,) = memory_of(f"STEP_VS_OTHERS={tmp_path}")
        process.communicate(b"\n")
    assert size > 64 << 10
    deadline = time.monotonic() + 10
    while memory_of(f"STEP_VS_OTHERS={tmp_path}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert memory_of(f"STEP_VS_OTHERS={tmp_path}") == []


def test_accuracies_and_values_are_read_from_the_steps() -> None:
    steps = [{"step": step, "timing_s/step": float(step)} for step in range(5)]
    steps[4]["val-core/digits/acc/mean@1"] = 0.5
    run = StepTiming(10.0, 1.0, 8, steps)
    assert accuracies(run) == {4: 0.5}
    assert step_vs_others.values_of([run], "timing_s/step") == [3.0, 4.0]  # two steps warm up
