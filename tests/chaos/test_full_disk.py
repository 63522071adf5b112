"""A disk that fills up in the middle of a save, and a newest checkpoint that is cut short: what was there
before is used.

The disk is a tmpfs, which takes root to mount.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from compared_runs import committed, differences
from real_runs import of_folder, train

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a disk of a given size takes root"),
]


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def resize(disk: Path, num_bytes: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={num_bytes}", str(disk)], check=True)


@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("room", [2.5, 2.02], ids=["for half a checkpoint", "for its first bytes"])
def test_a_full_disk_costs_the_steps_since_the_last_checkpoint(
    disk: Path, overrides: list[str], whole_run: Path, async_save: bool, room: float
) -> None:
    run, own = disk / "run", f"actor_rollout_ref.actor.checkpoint.async_save={async_save}"
    one = bytes_of(whole_run / "global_step_3")
    resize(disk, int(room * one) + (256 << 10))  # for metrics and samples
    full = train([*overrides, *of_folder(run), own])
    assert full.returncode == 1, full.stderr[-3000:]
    assert "Traceback" not in full.stderr
    message = full.stderr.strip().splitlines()[-1]
    assert message.startswith("the run ended: ")
    assert "No space left on device" in message
    assert "global_step_2 is still the newest one, whole and usable. Make room" in message
    assert committed(run) == [1, 2]
    assert differences(whole_run, run, 2) == []

    resize(disk, 64 << 20)
    (shard,) = (run / "global_step_2" / "actor").glob("*.distcp")
    os.truncate(shard, shard.stat().st_size - 1)
    resumed = train([*overrides, *of_folder(run), own])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "__0_0.distcp must have" in resumed.stdout
    assert f"falling back to {run / 'global_step_1'}" in resumed.stdout
    assert differences(whole_run, run, 6) == []
    shutil.rmtree(run)
