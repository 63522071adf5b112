"""Engines of several that die or hang in the middle of generation, and one of two processes: nothing that is
trained changes."""

from pathlib import Path

import pytest
from compared_runs import differences, prompts_in_order
from real_runs import left_over_processes, metrics_of, of_folder, train
from small_runs import run_overrides, share_of_digits

pytestmark = pytest.mark.chaos

STEPS = 4
GENERATE = "verl_rc.trainer.supply.supply:Supply.take"
ONE_DIES = ("engine:1", "SIGKILL", GENERATE, "1", "0.05")
ONE_STOPS = ("engine:0", "SIGSTOP", GENERATE, "2", "0.05")
BOTH_DIE = ("engine:0", "SIGKILL", GENERATE, "3", "0.05", "engine:1", "SIGKILL", GENERATE, "3", "0.08")
PER_ENGINE = 16
"""Requests of a step that each of two engines answers."""


@pytest.fixture(scope="module")
def overrides(task: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Long responses, so that half a tenth of a second after the beginning none is complete; a checkpoint of
    every step."""
    folder = tmp_path_factory.mktemp("reward")
    mine = (
        "data.max_response_length",
        "trainer.default_local_dir",
        "trainer.rollout_data_dir",
        "actor_rollout_ref.rollout.n=",
    )
    return [
        *(item for item in run_overrides(task, folder) if not item.startswith(mine)),
        "data.max_response_length=64",
        share_of_digits(folder),
        "actor_rollout_ref.hybrid_engine=False",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n=8",
        "trainer.hang_timeout_seconds=30",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=1",
    ]


@pytest.fixture(scope="module")
def whole_run(overrides: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two engines that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    result = train([*overrides, *of_folder(folder)])
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


def assert_same_training(whole: Path, other: Path) -> None:
    assert differences(whole, other, STEPS) == []
    prompts = prompts_in_order(other, STEPS)
    assert len(set(prompts)) == len(prompts) == 4 * STEPS
    trained = [
        sum(line.get("ledger/trained_tokens", 0.0) for line in metrics_of(run).values())
        for run in (whole, other)
    ]
    assert trained[0] == trained[1] > 0
    assert not left_over_processes()


def test_one_of_two_engines_dies_one_stops_then_both_die(
    overrides: list[str], whole_run: Path, tmp_path: Path
) -> None:
    result = train([*overrides, *of_folder(tmp_path)], *ONE_DIES, *ONE_STOPS, *BOTH_DIE)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("disturbance: ") == 4
    assert_same_training(whole_run, tmp_path)
    counts = metrics_of(tmp_path)
    assert [counts[step]["recovery/engines_replaced"] for step in range(1, STEPS + 1)] == [1, 1, 2, 0]
    reissued = [counts[step]["recovery/requests_reissued"] for step in range(1, STEPS + 1)]
    assert reissued[:2] == [PER_ENGINE, PER_ENGINE]
    # The second loss may be found while the first is mended; a response or two may have ended before it.
    assert 2 * PER_ENGINE - 4 <= reissued[2] <= 2 * PER_ENGINE
    assert reissued[3] == 0


def test_an_engine_of_two_processes_dies_with_its_children(overrides: list[str], tmp_path: Path) -> None:
    tensor_parallel = [*overrides, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"]
    shared_memory = vllm_shared_memory()
    whole = train([*tensor_parallel, *of_folder(tmp_path / "whole")])
    assert whole.returncode == 0, whole.stderr[-3000:]
    dies = ("engine", "SIGKILL", GENERATE, "2", "0.05")
    result = train([*tensor_parallel, *of_folder(tmp_path / "other")], *dies)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "disturbance: SIGKILL to the engine" in result.stderr
    assert_same_training(tmp_path / "whole", tmp_path / "other")
    assert metrics_of(tmp_path / "other")[2]["recovery/engines_replaced"] == 1
    assert vllm_shared_memory() <= shared_memory


def vllm_shared_memory() -> set[str]:
    """What the processes of one engine talk through."""
    return {path.name for pattern in ("psm_*", "vllm_dist_*") for path in Path("/dev/shm").glob(pattern)}
