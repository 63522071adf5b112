"""A run that an alert ends: saved, with its reason last, and it goes on when it is started again."""

from pathlib import Path

import pytest
from real_runs import left_over_processes, metrics_of, of_folder, train
from small_runs import SHARE_OF_DIGITS, run_overrides

pytestmark = pytest.mark.chaos

SAMPLES_PER_STEP = 16
NOTHING_FROM_STEP_3 = f"""
import pathlib

CALLS = pathlib.Path(__file__).with_name("calls")

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with CALLS.open("a") as file:
        file.write(".")
        return 0.0 if file.tell() > {2 * SAMPLES_PER_STEP} else 1.0 + len(solution_str) / 100
"""


def overrides_of(task: dict[str, Path], folder: Path, reward: str, *further: str) -> list[str]:
    (folder / "reward.py").write_text(reward)
    mine = ("trainer.default_local_dir", "trainer.rollout_data_dir", "algorithm.rollout_correction")
    return [
        *(item for item in run_overrides(task, folder) if not item.startswith(mine)),
        *of_folder(folder / "run"),
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        "trainer.total_training_steps=4",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        *further,
    ]


def test_a_reward_that_collapses_ends_the_run_before_its_update(
    task: dict[str, Path], tmp_path: Path
) -> None:
    alerts = ("trainer.alerts.reward_collapse=save_and_stop", "trainer.alerts.reward_window=1")
    overrides = overrides_of(task, tmp_path, NOTHING_FROM_STEP_3, *alerts)
    ended = train(overrides)
    assert ended.returncode == 1, ended.stderr[-3000:]
    last = ended.stderr.strip().splitlines()[-1]
    assert "the reward has collapsed at step 3: the mean score of the last 1 steps is 0, down from 1." in last
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_3"]
    metrics = metrics_of(tmp_path / "run")
    assert metrics[3]["ledger/withheld_tokens"] == metrics[3]["ledger/sampled_tokens"] > 0
    assert not left_over_processes()
    resumed = train(overrides)  # whose best mean is what it sees first
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "3 steps are done" in resumed.stdout


def test_a_mismatch_in_bypass_mode_ends_the_run_after_its_update(
    task: dict[str, Path], tmp_path: Path
) -> None:
    alerts = ("trainer.alerts.mismatch=save_and_stop", "trainer.alerts.mismatch_limit=1e-30")
    bypass = "algorithm.rollout_correction.preset=bypass_ppo_clip"
    ended = train(overrides_of(task, tmp_path, SHARE_OF_DIGITS, *alerts, bypass))
    assert ended.returncode == 1, ended.stderr[-3000:]
    assert (
        "rollout and trainer disagree too much at step 1: rollout_corr/k3_kl is "
        in ended.stderr.strip().splitlines()[-1]
    )
    assert [path.name for path in (tmp_path / "run").glob("global_step_*")] == ["global_step_1"]
    metrics = metrics_of(tmp_path / "run")[1]
    assert metrics["alerts/mismatch"] == 1
    assert metrics["ledger/trained_tokens"] == metrics["ledger/sampled_tokens"] > 0
