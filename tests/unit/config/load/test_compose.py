"""Groups: which there are, how their choices are written, and what wins."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.command_line import parse
from verl_rc.config.load.compose import Composer
from verl_rc.config.rollout_correction import PRESETS


def composed(*of_files: str, keys: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> dict[str, object]:
    composer = Composer(parse([*options, *of_files]), has_groups=True)
    tree = OmegaConf.to_container(composer.compose(composer.prepare_groups(of_files), keys))
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run file and a group of the user's own, which also has a choice of a group of the package."""
    (tmp_path / "run.yaml").write_text("defaults: [ppo_trainer, {exp: null}, _self_]\ntrainer: {seed: 3}\n")
    for group, name, text in [
        ("exp", "fast", "trainer: {total_epochs: 2}"),
        ("extra", "more", "trainer: {nnodes: 4}"),
        ("hardware", "mine", "trainer: {device: cpu, nnodes: 1}"),
        ("hardware", "cpu", "trainer: {nnodes: 77}"),
    ]:
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    return tmp_path


def test_every_preset_is_a_choice_of_correction() -> None:
    composer = Composer(parse([]), has_groups=True)
    assert composer.groups() == ["async", "correction", "hardware", "model", "task"]
    assert set(composer.loader.get_group_options("correction")) == set(PRESETS)
    for preset in ("disabled", "bypass_pg_is"):
        assert composed(f"correction={preset}") == {"algorithm": {"rollout_correction": {"preset": preset}}}


def test_without_groups_there_are_none() -> None:
    composer = Composer(parse([]), has_groups=False)
    assert not composer.is_group("task=digits")
    assert composer.compose([], ["++a.b=1"]) == {"a": {"b": 1}}


def test_keys_win_over_groups_and_groups_do_not_keep_them() -> None:
    assert composed("hardware=cpu", keys=("++trainer.nnodes=3",))["trainer"]["nnodes"] == 3  # type: ignore[index]
    assert composed("hardware=cpu", keys=("~trainer.nnodes",))["trainer"] == {
        "device": "cpu",
        "n_gpus_per_node": 1,
        "ready_timeout_seconds": 300,
    }
    assert composed("hardware=cpu")["trainer"]["nnodes"] == 1  # type: ignore[index]


@pytest.mark.parametrize("choice", ["+hardware=cpu", "hardware=cpu", "++hardware=cpu"])
def test_a_plus_before_a_group_says_no_more_than_none(choice: str) -> None:
    assert composed(choice) == composed("hardware=cpu")


@pytest.mark.parametrize("none", ["~task", "task=null", "~task=null"])
def test_no_choice(none: str) -> None:
    assert composed(none) == {}


def test_a_task_brings_its_model_unless_another_is_chosen() -> None:
    def model(*groups: str) -> object:
        return composed(*groups)["actor_rollout_ref"]["model"]["path"]  # type: ignore[index]

    assert model("task=digits") == "runs/quickstart/sft_model"
    assert "model" not in composed("task=digits", "model=null")["actor_rollout_ref"]  # type: ignore[operator]


def test_groups_and_run_files_of_the_users(folder: Path) -> None:
    options = ("--config-dir", str(folder), "--config-name=run")
    assert composed("exp=fast", options=options)["trainer"] == {"total_epochs": 2, "seed": 3}
    assert composed("extra=more", options=options)["trainer"] == {"nnodes": 4, "seed": 3}
    assert composed("+extra=more", options=options[:2])["trainer"] == {"nnodes": 4}
    assert composed("hardware=mine", options=options[:2])["trainer"] == {"device": "cpu", "nnodes": 1}


def test_groups_of_the_command_line_win_over_a_run_file(folder: Path) -> None:
    (folder / "plain.yaml").write_text("trainer: {seed: 5, test_freq: 1}\n")
    options = ("--config-dir", str(folder), "--config-name=plain")
    trainer = composed("task=digits", "hardware=cpu", "model=null", options=options)["trainer"]
    assert (trainer["seed"], trainer["test_freq"], trainer["save_freq"], trainer["nnodes"]) == (5, 20, 80, 77)  # type: ignore[index]
    assert composed(options=options) == {"trainer": {"seed": 5, "test_freq": 1}}


def test_a_run_file_that_chooses_from_one_group_has_place_for_the_others(folder: Path) -> None:
    (folder / "mine.yaml").write_text("defaults: [{hardware: mine}, _self_]\ntrainer: {nnodes: 9}\n")
    options = ("--config-dir", str(folder), "--config-name=mine")
    tree = composed("task=digits", "correction=tis", options=options)
    assert (tree["trainer"]["device"], tree["trainer"]["nnodes"], tree["data"]["train_batch_size"]) == (
        "cpu",
        9,
        32,
    )  # type: ignore[index]
    assert composed("hardware=cpu", options=options)["trainer"] == {"nnodes": 9}


def test_the_folder_that_wins_where_both_have_a_file(folder: Path) -> None:
    def nodes(option: str) -> object:
        return composed("hardware=cpu", options=(option, str(folder)))["trainer"]["nnodes"]  # type: ignore[index]

    assert (nodes("--config-dir"), nodes("--config-path")) == (77, 77)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            ["task=digits", "task=digits"],
            "the group task must be given once, got task=digits and task=digits",
        ),
        (["task=digits", "~task"], "the group task must be given once, got task=digits and ~task"),
        (["hardware=cpus"], "hardware must be one of .*cpu.*; got 'cpus', did you mean cpu"),
        (["hardware=[cpu,gpu]"], "hardware must be one of .*cpu.*; got 'gpu'"),
        (["hardware=8"], "hardware must be one of .*cpu.*; got '8'"),
        (["correction=decoupled_sq_is"], "did you mean decoupled_seq_is"),
        (["task=digits,digits"], "task=digits,digits is several values: write --multirun for a run each"),
    ],
)
def test_what_cannot_be_meant(groups: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        composed(*groups)
    assert "\n" not in str(raised.value)
