"""What was given, as a plain tree: interpolations, values still to be given, presets."""

from pathlib import Path

import pytest

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.command_line import parse
from verl_rc.config.load.given import combinations, given_tree
from verl_rc.config.run import RunConfig


def given(*arguments: str) -> dict[str, object]:
    return given_tree(RunConfig, parse(arguments)).tree


def test_nothing_is_added_to_what_was_given() -> None:
    assert given() == {}
    assert given("trainer.seed=1") == {"trainer": {"seed": 1}}


def test_interpolations_may_name_defaults() -> None:
    assert given("data.val_batch_size='${data.max_prompt_length}'") == {"data": {"val_batch_size": 512}}


def test_what_is_still_to_be_given_was_not(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data:\n  train_files: ???\n  shuffle: false\n")
    arguments = (f"--config-dir={tmp_path}", "-cn=run")
    assert given(*arguments) == {"data": {"shuffle": False}}
    assert given(*arguments, "data.train_files=a") == {"data": {"train_files": "a", "shuffle": False}}


def test_a_group_names_a_preset_over_which_leaves_win() -> None:
    def correction(*arguments: str) -> object:
        return given("correction=icepop", *arguments)["algorithm"]["rollout_correction"]  # type: ignore[index]

    assert correction() == {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
    assert correction("algorithm.rollout_correction.rollout_is_threshold=2.0")["rollout_is_threshold"] == "2.0"  # type: ignore[index]
    assert correction("algorithm.rollout_correction.preset=decoupled_seq_is") == {"rollout_is": "sequence"}


def test_the_runs_of_a_sweep() -> None:
    runs = combinations(RunConfig, parse(["-m", "trainer.seed=1,2", "correction=icepop,tis", "data.shuffle=False"]))
    assert len(runs) == 4
    assert runs[0] == ["correction=icepop", "++trainer.seed=1", "++data.shuffle=False"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  shuffle: [", r"run\.yaml, line 3, must be YAML: while parsing a flow node\."),
        ("data: {val_batch_size: '${data.nothing}'}", r"be composed: .*nothing.* \(at data\.val_batch_size\)"),
        ("defaults: [task: ghost]", "the configuration cannot be composed: .*task/ghost"),
        ("defaults: [ghost]", "the configuration cannot be composed: .*ghost"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=message) as raised:
        given(f"--config-dir={tmp_path}", "--config-name=run")
    assert "\n" not in str(raised.value)
