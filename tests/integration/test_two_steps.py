"""Two steps of the real loop as a user starts it: every part real, every metric in the catalogue, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from real_runs import left_over_processes, marked_environment
from small_runs import ROOT, run_overrides

from verl_rc.config.load import load_config
from verl_rc.config.run import RunConfig
from verl_rc.metrics import check_names


def train(overrides: list[str]) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "verl_rc.main_ppo", *overrides]
    environment = marked_environment()
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def finished_run(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_steps")
    result = train(run_overrides(task, folder))
    assert result.returncode == 0, result.stderr[-3000:]
    said = result.stdout.splitlines()
    assert said[-2] == f"training curves: {folder / 'training_curves.png'}"
    assert "validation accuracy: " in said[-1]
    assert (folder / "training_curves.png").read_bytes().startswith(b"\x89PNG")
    assert not left_over_processes()
    return folder


def test_metrics_of_every_step_are_written_and_known(finished_run: Path) -> None:
    lines = [json.loads(line) for line in (finished_run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    names = {name for line in lines for name in line} - {"step"}
    check_names(names)
    for name in (
        "rollout_corr/rollout_is_eff_sample_size",
        "rollout_corr/rollout_rs_seq_sum_k1_masked_fraction",
        "actor/grad_norm",
        "critic/score/mean",
        "response_length/clip_ratio",
        "timing_s/step",
        "perf/overhead_fraction",
    ):
        assert name in lines[1], name
    assert "val-core/digits/acc/mean@1" in lines[0]
    assert "val-core/digits/acc/mean@1" not in lines[1]
    assert "val-core/digits/acc/mean@1" in lines[2]


def test_rollouts_are_dumped_with_their_scores(finished_run: Path) -> None:
    samples = [json.loads(line) for line in (finished_run / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 * 4
    assert {"input", "output", "gts", "score", "step", "acc"} <= set(samples[0])


def test_the_resolved_configuration_loads_back(finished_run: Path) -> None:
    path = finished_run / "resolved_config.yaml"
    again = load_config(RunConfig, ["--config-dir", str(path.parent), "--config-name", path.stem])
    assert again.model_dump(mode="json") == yaml.safe_load(path.read_text())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def compute_score(**kwargs):\n    raise KeyError('no such answer')\n", "the reward function raised KeyError"),
        ("def compute_score(**kwargs):\n    return 'good'\n", "must be a finite number, got 'good'"),
    ],
)
def test_a_reward_function_that_fails_ends_the_run_with_its_sample(
    task: dict[str, Path], tmp_path: Path, source: str, message: str
) -> None:
    (tmp_path / "reward.py").write_text(source)
    custom = [f"reward.custom_reward_function.path={tmp_path / 'reward.py'}", "trainer.val_before_train=False"]
    result = train([*run_overrides(task, tmp_path), *custom])
    assert result.returncode == 1
    assert message in result.stderr[-1500:]
    assert not left_over_processes()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.max_prompt_length=5", "data.max_prompt_length"),
        ("data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=128", "data.train_batch_size"),
        ("trainer.n_gpus_per_node=64 data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64", "needs a core"),
    ],
)
def test_impossible_data_or_resources_exit_with_2(
    task: dict[str, Path], tmp_path: Path, override: str, message: str
) -> None:
    result = train([*run_overrides(task, tmp_path), *override.split()])
    assert result.returncode == 2, result.stderr[-2000:]
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not left_over_processes()


def test_ctrl_c_ends_the_run_and_everything_it_started(task: dict[str, Path], tmp_path: Path) -> None:
    overrides = [*run_overrides(task, tmp_path), "trainer.total_epochs=1000", "trainer.total_training_steps=10000"]
    environment = {**marked_environment(), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "verl_rc.main_ppo", *overrides]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 2/"):
            break
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does: to the whole process group
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors[-2000:]
    assert errors.strip().endswith("interrupted")
    assert not left_over_processes()
