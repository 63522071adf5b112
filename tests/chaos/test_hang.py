"""A trainer rank that hangs in the middle of an update: who waits for whom is told, the run ends in bounded
time, and goes on."""

import subprocess
import time
from pathlib import Path

import pytest
from compared_runs import differences
from real_runs import left_over_processes, of_folder, train
from small_runs import run_overrides, share_of_digits

pytestmark = pytest.mark.chaos

STEPS = 3
HANG_TIMEOUT_SECONDS = 20.0
BOUND_SECONDS = 300.0
"""Looking into the processes, ending them and Ray, on two busy cores."""


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two ranks and two engines; a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("reward")
    mine = ("trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.n_gpus_per_node")
    return [
        *(item for item in run_overrides(task, folder) if not item.startswith(mine)),
        share_of_digits(folder),
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.hang_timeout_seconds={HANG_TIMEOUT_SECONDS:g}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
    ]


def assert_told_who_waits_for_whom(
    result: "subprocess.CompletedProcess[str]", report: Path, condition: str
) -> None:
    assert result.returncode == 1, result.stderr[-3000:]
    assert time.time() - report.stat().st_mtime < BOUND_SECONDS
    assert not left_over_processes()
    last = result.stderr.rpartition("HangError: ")[2]
    assert (
        f"did not answer within {HANG_TIMEOUT_SECONDS:.0f} s: actor rank 0 (update), actor rank 1 (update)."
        in last
    )
    assert "  actor rank 0: waits in a collective for its peers, at " in last
    assert f"  actor rank 1: {condition}" in last
    assert str(report) in last
    text = report.read_text()
    assert "trainer/stages.py" in text  # where the driver waits
    assert "policy_worker.py" in text  # where rank 0 does


def test_a_rank_that_hangs_in_an_update_ends_the_run_which_then_goes_on(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = tmp_path / "whole", tmp_path / "other"
    result = train([*overrides, *of_folder(whole)])
    assert result.returncode == 0, result.stderr[-3000:]
    mine = [*overrides, *of_folder(other)]

    stopped = train(mine, "actor:1", "SIGSTOP", "verl_rc.trainer.stages:update_actor", "2", "before")
    (first,) = other.glob("hang-*.txt")
    assert_told_who_waits_for_whom(stopped, first, "is stopped by a signal (SIGSTOP)")

    with monkeypatch.context() as patch:
        patch.setenv("ACTOR_WORKER", "sleepy_worker:SleepyPolicyWorker")
        asleep = train(mine)
    (second,) = set(other.glob("hang-*.txt")) - {first}
    assert_told_who_waits_for_whom(asleep, second, "at accumulate (")
    assert "1 steps are done" in asleep.stdout

    awake = train(mine)
    assert awake.returncode == 0, awake.stderr[-3000:]
    assert "2 steps are done" in awake.stdout
    assert differences(whole, other, STEPS) == []
