"""A small model and task, a run that saves every one of its six steps, and that run when nothing disturbs
it."""

from pathlib import Path

import pytest
from real_runs import of_folder, train
from small_runs import SHARE_OF_DIGITS, make_game, make_task, run_overrides


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chaos")
    (folder / "reward.py").write_text(SHARE_OF_DIGITS)
    return folder


@pytest.fixture(scope="session")
def overrides(task: dict[str, Path], folder: Path) -> list[str]:
    return overrides_of(task, folder)


@pytest.fixture(scope="session")
def game_overrides(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[str]:
    """A run whose samples are episodes of an environment."""
    return overrides_of(make_game(tmp_path_factory.mktemp("game")), folder)


@pytest.fixture(scope="session")
def expert_overrides(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[str]:
    """A run of a model with experts."""
    return overrides_of(make_task(tmp_path_factory.mktemp("experts"), "--experts", "5"), folder)


def overrides_of(task: dict[str, Path], folder: Path) -> list[str]:
    return [
        *(
            item
            for item in run_overrides(task, folder)
            if not item.startswith(("trainer.default", "trainer.rollout_data_dir"))
        ),
        f"reward.custom_reward_function.path={folder / 'reward.py'}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.sync_proof.canary_freq=0",
        "trainer.total_training_steps=6",
        "trainer.val_before_train=False",
        "trainer.test_freq=1",
        "trainer.save_freq=1",
    ]


@pytest.fixture(scope="session")
def whole_run(overrides: list[str], folder: Path) -> Path:
    result = train([*overrides, *of_folder(folder / "whole")])
    assert result.returncode == 0, result.stderr[-3000:]
    return folder / "whole"
