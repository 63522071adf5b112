"""Checks between keys: all problems are listed at once, and files are looked for separately."""

from pathlib import Path

import pytest

from verl_rc.config.checks import check_files, check_run
from verl_rc.config.errors import ConfigError
from verl_rc.config.load import load_config
from verl_rc.config.run import RunConfig


def make_config(folder: Path, *overrides: str) -> RunConfig:
    paths = [
        f"data.train_files={folder}/a.parquet",
        f"data.val_files={folder}/b.parquet",
        f"actor_rollout_ref.model.path={folder}",
    ]
    small = ["actor_rollout_ref.actor.use_dynamic_bsz=True", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.n=4"]
    return load_config(RunConfig, [*paths, *small, "algorithm.adv_estimator=grpo", *overrides])


def test_a_sound_run_passes(tmp_path: Path) -> None:
    check_run(make_config(tmp_path))


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(make_config(tmp_path, "data.train_batch_size=100", "actor_rollout_ref.rollout.top_p=0.5"))
    assert len(str(caught.value).splitlines()) == 2


def test_missing_files_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        check_files(make_config(tmp_path))
    message = str(caught.value)
    assert all(name in message for name in ("a.parquet", "b.parquet", "actor_rollout_ref.model.path"))


def test_files_that_are_there_pass(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet", "config.json"):
        (tmp_path / name).touch()
    check_files(make_config(tmp_path))


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"])
def test_output_that_could_not_be_written_is_refused_before_anything_starts(tmp_path: Path, key: str) -> None:
    for name in ("a.parquet", "b.parquet", "config.json"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"^{key} must be a folder that can be written to, got .*: Not a directory"):
        check_files(make_config(tmp_path, f"{key}={tmp_path}/a.parquet/run"))


def test_a_hub_id_is_not_looked_for_on_disk(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).touch()
    check_files(make_config(tmp_path, "actor_rollout_ref.model.path=Qwen/Qwen2.5-0.5B"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_weights=[1,2]"], "data.train_weights must hold one number for each of the 1 data.train_files, got 2"),
        (["data.train_weights=[0]"], r"data.train_weights must be positive numbers, got \[0.0\]"),
        (["data.custom_cls.path=a.py"], "data.custom_cls.path and data.custom_cls.name belong together"),
        (
            ["data.custom_cls.path=a.py", "data.custom_cls.name=A", "data.train_weights=[1]"],
            "data.train_weights is refused with data.custom_cls",
        ),
        (["actor_rollout_ref.rollout.multi_turn.format=tag"], "multi_turn has no effect without .*, but format was given"),
        (["actor_rollout_ref.rollout.multi_turn.enable=True"], r"needs a tool: pass .*multi_turn.tools=\[calculator\]"),
        (
            [
                "actor_rollout_ref.rollout.multi_turn.enable=True",
                "actor_rollout_ref.rollout.multi_turn.tools=[calculator]",
                "actor_rollout_ref.rollout.ignore_eos=True",
            ],
            "needs turns that end",
        ),
    ],
)
def test_data_and_tools_that_contradict(overrides: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check_run(make_config(tmp_path, *overrides))


def test_a_class_of_ones_own_finds_its_data_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    own = ["data.custom_cls.name=Own", f"data.custom_cls.path={tmp_path}/own.py"]
    with pytest.raises(ConfigError, match=r"^data.custom_cls.path must name existing files.*own.py' does not exist.$"):
        check_files(make_config(tmp_path, *own))
    (tmp_path / "own.py").touch()
    check_files(make_config(tmp_path, *own))
