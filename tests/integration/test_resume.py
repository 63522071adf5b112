"""A run of four steps equals one resumed after two: same metrics, same weights, to the last bit."""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from real_runs import left_over_processes, of_folder, train

from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_run_config
from verl_rc.runtime.checkpoint import load_full_state_dict
from verl_rc.trainer import checkpoints
from verl_rc.trainer.setup import open_run

NOT_OF_THE_TRAINING = ("timing_", "perf/", "sync/canary")


def metrics_by_step(folder: Path) -> dict[int, dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        line["step"]: {
            name: value for name, value in line.items() if not name.startswith(NOT_OF_THE_TRAINING)
        }
        for line in lines
    }


def assert_equal_runs(folder: Path, whole_run: Path) -> None:
    """Metrics, weights and optimizer steps of ``folder`` after step 2 are those of ``whole_run``, and
    something was learned."""
    expected, found = metrics_by_step(whole_run), metrics_by_step(folder)
    assert list(expected) == [0, 1, 2, 3, 4]
    assert {3, 4} <= found.keys()
    for step in found:
        assert found[step] == expected[step], step
    assert expected[3]["actor/grad_norm"] > 0
    for role in ("actor", "critic"):
        one, two = (load_full_state_dict(run / "global_step_4" / role) for run in (whole_run, folder))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)
        before = load_full_state_dict(whole_run / "global_step_2" / role)
        assert any(not torch.equal(one[name], before[name]) for name in one)


WAITING = "actor_rollout_ref.actor.checkpoint.async_save=False"


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(
    overrides: list[str], whole_run: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole_run / "global_step_2", tmp_path / "again" / "global_step_2")
    resumed = train([*overrides, *of_folder(tmp_path / "again"), WAITING, "trainer.save_freq=100"])
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert "2 steps are done" in resumed.stdout
    assert list(metrics_by_step(tmp_path / "again")) == [3, 4]
    assert_equal_runs(tmp_path / "again", whole_run)


@pytest.mark.slow
def test_a_terminated_run_finishes_its_step_and_goes_on(
    overrides: list[str], whole_run: Path, tmp_path: Path
) -> None:
    again = [*overrides, *of_folder(tmp_path / "again"), WAITING, "trainer.save_freq=100"]
    terminated = train(again, "driver", "SIGTERM", "verl_rc.trainer.stages:update_critic", "2", "before")
    assert terminated.returncode == 143, terminated.stderr[-3000:]
    assert "SIGTERM: finishing the step" in terminated.stdout
    assert "Traceback" not in terminated.stderr
    assert [path.name for path in (tmp_path / "again").glob("global_step_*")] == ["global_step_2"]
    resumed = train(again)
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert list(metrics_by_step(tmp_path / "again")) == [0, 1, 2, 3, 4]
    assert_equal_runs(tmp_path / "again", whole_run)


def refusal(overrides: Sequence[str]) -> str:
    """Why a run that is opened with ``overrides`` does not start; that is known before Ray is needed."""
    with pytest.raises(ConfigError) as caught, open_run(load_run_config(overrides), Future()):
        pass
    return str(caught.value)


def test_a_broken_newest_checkpoint_falls_back_and_another_model_is_refused(
    overrides: list[str], whole_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(whole_run, tmp_path / "broken")
    (tmp_path / "broken" / "global_step_4" / "run_state.json").write_text("{")
    said: list[str] = []
    monkeypatch.setattr(checkpoints, "log", lambda message, *given: said.append(message % given))
    options = [f"trainer.default_local_dir={tmp_path / 'broken'}", "actor_rollout_ref.model.lora_rank=4"]
    assert "lora_rank was 0, now it is 4" in refusal([*overrides, *options])
    assert "falling back to" in said[0]


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
    alert = [
        "trainer.alerts.reward_collapse=skip",
        "trainer.alerts.reward_window=1",
        "trainer.critic_warmup=0",
    ]
    reward = f"reward.custom_reward_function.path={tmp_path / 'collapse.py'}"
    options = [
        *overrides,
        reward,
        *alert,
        "data.shuffle=False",
        "trainer.save_freq=1",
        "algorithm.adv_estimator=grpo",
    ]
    runs = [tmp_path / "whole", tmp_path / "again"]
    for folder in runs:
        if folder.name == "again":
            shutil.copytree(runs[0] / "global_step_3", folder / "global_step_3")
        result = train([*options, f"trainer.default_local_dir={folder}"])
        assert result.returncode == 0, result.stderr[-3000:]
    expected, found = (metrics_by_step(folder)[4] for folder in runs)
    assert [metrics_by_step(runs[0])[step]["alerts/reward_collapse"] for step in (1, 2, 3, 4)] == [0, 0, 0, 1]
    assert expected["alerts/withheld_updates"] == 1
    assert found == expected
    one, two = (load_full_state_dict(folder / "global_step_4" / "actor") for folder in runs)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_checkpoint_that_is_not_there_is_named(overrides: list[str], tmp_path: Path) -> None:
    options = ["trainer.resume_mode=resume_path", "trainer.resume_from_path=/nowhere"]
    assert "there is no folder '/nowhere'" in refusal(
        [*overrides, f"trainer.default_local_dir={tmp_path}", *options]
    )


@pytest.mark.slow
def test_a_mistake_that_a_rank_finds_is_one_message_and_nothing_stays_behind(
    overrides: list[str], tmp_path: Path
) -> None:
    options = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_prj]"]
    result = train([*overrides, f"trainer.default_local_dir={tmp_path}", *options])
    assert result.returncode == 2, result.stderr[-3000:]
    assert "must match modules" in result.stderr
    assert "Traceback" not in result.stderr
    assert not left_over_processes()
