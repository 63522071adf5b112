"""A run of four steps equals two steps, a stop, and two steps more: same metrics, same weights, to the last bit."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import ROOT, SHARE_OF_DIGITS, run_overrides

from verl_rc.checkpoint import load_full_state_dict

WITH_EVERYTHING = [
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1e-3",
    "critic.fsdp_config.dtype=float32",
    "trainer.critic_warmup=2",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.kl_coef=0.1",
    "algorithm.kl_ctrl.horizon=100",
    "actor_rollout_ref.rollout.sync_proof.canary_freq=0",
    "trainer.total_training_steps=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.save_freq=2",
    "actor_rollout_ref.actor.checkpoint.async_save=True",
]
NOT_OF_THE_TRAINING = ("timing_", "perf/", "sync/canary")


def train(*overrides: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "verl_rc.main_ppo", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if not name.startswith(NOT_OF_THE_TRAINING)} for line in lines
    }


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "reward.py").write_text(SHARE_OF_DIGITS)
    reward = f"reward.custom_reward_function.path={folder / 'reward.py'}"
    kept = [item for item in run_overrides(task, folder / "whole") if not item.startswith("trainer.rollout_data_dir")]
    return [*kept, reward, *WITH_EVERYTHING]


@pytest.fixture(scope="module")
def whole_run(overrides: list[str]) -> Path:
    result = train(*overrides)
    assert result.returncode == 0, result.stderr[-3000:]
    return Path(next(item for item in overrides if item.startswith("trainer.default_local_dir")).partition("=")[2])


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(overrides: list[str], whole_run: Path, tmp_path: Path) -> None:
    shutil.copytree(whole_run / "global_step_2", tmp_path / "again" / "global_step_2")
    waiting = "actor_rollout_ref.actor.checkpoint.async_save=False"
    result = train(*overrides, f"trainer.default_local_dir={tmp_path / 'again'}", waiting)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "2 steps are done" in result.stdout
    expected, found = metrics_by_step(whole_run), metrics_by_step(tmp_path / "again")
    assert list(found) == [3, 4]
    for step in (3, 4):
        assert found[step] == expected[step]
        assert expected[step]["actor/grad_norm"] > 0
    for role in ("actor", "critic"):
        one, two = (load_full_state_dict(folder / "global_step_4" / role) for folder in (whole_run, tmp_path / "again"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        before = load_full_state_dict(whole_run / "global_step_2" / role)
        assert any(not torch.equal(one[name], before[name]) for name in one)


def test_a_broken_newest_checkpoint_falls_back_and_another_model_is_refused(
    overrides: list[str], whole_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_run, tmp_path / "broken")
    (tmp_path / "broken" / "global_step_4" / "run_state.json").write_text("{")
    result = train(*overrides, f"trainer.default_local_dir={tmp_path / 'broken'}", "actor_rollout_ref.model.lora_rank=4")
    assert result.returncode == 2, result.stderr[-3000:]
    assert "falling back to" in result.stdout
    assert "lora_rank was 0, now it is 4" in result.stderr
    assert "Traceback" not in result.stderr


COLLAPSING = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = sum(a == b for a, b in zip(solution_str, str(ground_truth))) / 10
    return right / 100 if extra_info["index"] >= 12 else 1 + right
"""
"""The scores of the first three steps of four prompts are good, those of later ones are not."""


@pytest.mark.slow
def test_a_resumed_run_notices_a_collapse_of_the_reward_as_the_undisturbed_one_does(
    overrides: list[str], tmp_path: Path
) -> None:
    (tmp_path / "collapse.py").write_text(COLLAPSING)
    alert = ["trainer.alerts.reward_collapse=skip", "trainer.alerts.reward_window=1", "trainer.critic_warmup=0"]
    reward = f"reward.custom_reward_function.path={tmp_path / 'collapse.py'}"
    options = [*overrides, reward, *alert, "data.shuffle=False", "trainer.save_freq=1", "algorithm.adv_estimator=grpo"]
    runs = [tmp_path / "whole", tmp_path / "again"]
    for folder in runs:
        if folder.name == "again":
            shutil.copytree(runs[0] / "global_step_3", folder / "global_step_3")
        result = train(*options, f"trainer.default_local_dir={folder}")
        assert result.returncode == 0, result.stderr[-3000:]
    expected, found = (metrics_by_step(folder)[4] for folder in runs)
    assert [metrics_by_step(runs[0])[step]["alerts/reward_collapse"] for step in (1, 2, 3, 4)] == [0, 0, 0, 1]
    assert expected["alerts/withheld_updates"] == 1
    assert found == expected
    one, two = (load_full_state_dict(folder / "global_step_4" / "actor") for folder in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("trainer.resume_mode=resume_path trainer.resume_from_path=/nowhere", "there is no folder '/nowhere'"),
        ("actor_rollout_ref.model.lora_rank=4 actor_rollout_ref.model.target_modules=[q_prj]", "must match modules"),
        ("actor_rollout_ref.ref.model_path=/nowhere", "actor_rollout_ref.ref.model_path must be a Hugging Face model"),
        ("critic.model.path=/nowhere", "critic.model.path must be a Hugging Face model"),
    ],
)
def test_what_cannot_be_meant_is_one_message(overrides: list[str], tmp_path: Path, bad: str, message: str) -> None:
    result = train(*overrides, f"trainer.default_local_dir={tmp_path}", *bad.split())
    assert result.returncode == 2, result.stderr[-3000:]
    assert message in result.stderr
    assert "Traceback" not in result.stderr
