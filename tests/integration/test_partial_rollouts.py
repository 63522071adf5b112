"""Real runs in which weights change under running responses: versions, metrics, and kill -9, to the last
bit."""

from pathlib import Path

import pytest
from compared_runs import committed, differences, prompts_in_order
from real_runs import left_over_processes, metrics_of, of_folder, train

from verl_rc.metrics import check_names

PARTIAL = [
    "algorithm.rollout_correction.preset=score_centering_token_is",
    "async_training.staleness_threshold=2",
    "async_training.partial_rollout=True",
    "actor_rollout_ref.hybrid_engine=False",
    "actor_rollout_ref.actor.checkpoint.async_save=False",
    "actor_rollout_ref.rollout.sync_proof.canary_freq=1",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "trainer.save_freq=1",
]
DETERMINISTIC = [*PARTIAL, "async_training.deterministic_steps=5"]


@pytest.fixture(scope="module")
def whole_partial(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four steps with five engine steps for each version.

    Two of three batches have room in the engine: responses of the last two steps begin with one version and
    end with a later one.
    """
    folder = tmp_path_factory.mktemp("partial")
    result = train([*overrides, *DETERMINISTIC, *of_folder(folder)])
    assert result.returncode == 0, result.stderr[-3000:]
    assert not left_over_processes()
    return folder


@pytest.mark.slow
def test_responses_have_several_versions_and_canaries_prove_each(whole_partial: Path) -> None:
    metrics = metrics_of(whole_partial)
    check_names({name for line in metrics.values() for name in line} - {"step"})
    assert all(metrics[step]["async/group_age/max"] <= 2 for step in (1, 2, 3, 4))
    spans = [metrics[step]["training/off_policy/trajectory_spans/max"] for step in (1, 2, 3, 4)]
    assert spans[0] == 1
    assert min(spans[2:]) >= 2
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (2, 3, 4))
    assert all(metrics[step]["sync/canary_mean_gap"] < 1e-5 for step in range(5))
    # The heads of all tokens came: the engine gives 32 of some 300 tokens a part of its mass.
    assert all(0.1 < metrics[step]["rollout_corr/centering_head_mass"] < 1 for step in (2, 3, 4))
    assert [step for step in metrics if "val-core/digits/acc/mean@1" in metrics[step]] == [0, 2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "saved"),
    [
        # The actor learns from step 2 on. The checkpoint of step 2 holds parts of version 1.
        (("verl_rc.trainer.stages:update_actor", "2", "before"), 2),
        (("verl_rc.trainer.cluster.engine_group:EngineGroup.collect_parts", "2", "before"), 1),
    ],
)
def test_a_killed_run_leaves_what_the_undisturbed_one_leaves(
    overrides: list[str], whole_partial: Path, tmp_path: Path, point: tuple[str, str, str], saved: int
) -> None:
    again = [*overrides, *DETERMINISTIC, *of_folder(tmp_path)]
    assert train(again, "driver", "SIGKILL", *point).returncode != 0
    assert committed(tmp_path)[-1] == saved
    result = train(again)
    assert result.returncode == 0, result.stderr[-3000:]
    assert not differences(whole_partial, tmp_path, 4)
    assert prompts_in_order(tmp_path, 4) == prompts_in_order(whole_partial, 4)
    assert len(set(prompts_in_order(tmp_path, 4))) == 16


@pytest.mark.slow
def test_an_engine_that_is_killed_loses_no_sample(overrides: list[str], tmp_path: Path) -> None:
    """T7, T8: its responses go on from what the last update brought; every version is one that was
    published."""
    point = ("verl_rc.trainer.cluster.engine_group:EngineGroup.collect_parts", "2", "before")
    result = train([*overrides, *PARTIAL, *of_folder(tmp_path)], "engine", "SIGKILL", *point)
    assert result.returncode == 0, result.stderr[-3000:]
    metrics = metrics_of(tmp_path)
    assert sum(line["recovery/engines_replaced"] for line in metrics.values()) == 1
    assert len(set(prompts_in_order(tmp_path, 4))) == 16
    assert all(
        metrics[step]["training/off_policy/trajectory_staleness_worst/min"] >= 0 for step in (1, 2, 3, 4)
    )
