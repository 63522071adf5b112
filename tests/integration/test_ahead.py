"""A real run one step off: ages, metrics in the catalogue, and kill -9 in the middle of a step, to the last
bit."""

from pathlib import Path

import pytest
import torch
from compared_runs import committed, differences, prompts_in_order, saved_tensors
from real_runs import left_over_processes, metrics_of, of_folder, train

from verl_rc.metrics import check_names

AHEAD = [
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "async_training.staleness_threshold=1",
    "async_training.partial_rollout=False",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.checkpoint.async_save=False",
    "trainer.save_freq=1",
]


@pytest.fixture(scope="module")
def whole_ahead(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four steps, each sampled while the one before it was trained on."""
    folder = tmp_path_factory.mktemp("ahead")
    result = train([*overrides, *AHEAD, *of_folder(folder)])
    assert result.returncode == 0, result.stderr[-3000:]
    assert not left_over_processes()
    return folder


@pytest.mark.slow
def test_ages_are_those_of_the_rule(whole_ahead: Path) -> None:
    metrics = metrics_of(whole_ahead)
    check_names({name for line in metrics.values() for name in line} - {"step"})
    assert [metrics[step]["async/token_age/mean"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (2, 3, 4))
    assert [step for step in metrics if "val-core/digits/acc/mean@1" in metrics[step]] == [0, 2, 4]


@pytest.mark.slow
def test_two_steps_a_publication_by_completion_and_without_prompts_that_tell_nothing(
    overrides: list[str], tmp_path: Path
) -> None:
    mode = [
        "async_training.trigger_parameter_sync_step=2",
        "async_training.order=ready",
        "algorithm.filter_groups.enable=True",
    ]
    result = train([*overrides, *AHEAD, *mode, "async_training.max_token_age=2", *of_folder(tmp_path)])
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = metrics_of(tmp_path)
    check_names({name for line in metrics.values() for name in line} - {"step"})
    assert committed(tmp_path) == [2, 4]
    assert all(metrics[step]["async/group_age/max"] <= 3 for step in (1, 2, 3, 4))
    assert [step for step in metrics if "val-core/digits/acc/mean@1" in metrics[step]] == [0, 2, 4]
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (2, 3))  # step 4 is trained on older tokens
    assert "the trainer waited for samples" in result.stdout
    assert not left_over_processes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "point"),
    [
        ("driver", ("verl_rc.trainer.stages:update_actor", "2", "0.01")),
        ("driver", ("verl_rc.trainer.supply.supply:join_groups", "3", "before")),
    ],
)
def test_a_killed_run_leaves_what_the_undisturbed_one_leaves(
    overrides: list[str], whole_ahead: Path, tmp_path: Path, victim: str, point: tuple[str, str, str]
) -> None:
    again = [*overrides, *AHEAD, *of_folder(tmp_path)]
    assert train(again, victim, "SIGKILL", *point).returncode != 0
    assert committed(tmp_path)[-1] < 4
    result = train(again)
    assert result.returncode == 0, result.stderr[-3000:]
    assert not differences(whole_ahead, tmp_path, 4)
    assert prompts_in_order(tmp_path, 4) == prompts_in_order(whole_ahead, 4)
    assert len(set(prompts_in_order(tmp_path, 4))) == 16


STAGED = [*AHEAD, "async_training.staleness_threshold=2", "trainer.save_freq=4"]
STAGE = "actor_rollout_ref.rollout.checkpoint_engine.stage_updates=True"


@pytest.mark.slow
def test_engines_that_load_weights_when_they_can_leave_what_the_others_leave(
    overrides: list[str], tmp_path: Path
) -> None:
    """Whole responses, steps 1 and 3 published beside what runs; and with an engine that is lost in such a
    publication."""
    waiting, beside, lost = tmp_path / "waiting", tmp_path / "beside", tmp_path / "lost"
    assert train([*overrides, *STAGED, *of_folder(waiting)]).returncode == 0
    result = train([*overrides, *STAGED, STAGE, *of_folder(beside)])
    assert result.returncode == 0, result.stderr[-3000:]
    assert committed(beside) == [4]
    one, two = (saved_tensors(folder / "global_step_4" / "actor") for folder in (waiting, beside))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    for step in (1, 2, 3, 4):
        assert (waiting / "rollouts" / f"{step}.jsonl").read_bytes() == (
            beside / "rollouts" / f"{step}.jsonl"
        ).read_bytes()
    point = ("verl_rc.trainer.weights:Publisher.publish_staged", "2", "0.005")
    result = train([*overrides, *STAGED, STAGE, *of_folder(lost)], "engine", "SIGKILL", *point)
    assert result.returncode == 0, result.stderr[-3000:]
    assert len(set(prompts_in_order(lost, 4))) == 16
    assert sum(line["recovery/engines_replaced"] for line in metrics_of(lost).values()) == 1
