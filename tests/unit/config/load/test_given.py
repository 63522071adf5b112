"""Overrides and files become one plain tree; what cannot be meant, and what is wrong with values, is said in
sentences."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from verl_rc.config.errors import ConfigError
from verl_rc.config.load.command_line import parse
from verl_rc.config.load.compose import Composer
from verl_rc.config.load.given import (
    Prepared,
    check_keys,
    combinations,
    error_sentences,
    given_tree,
    prepare,
    refuse_huge_numbers,
)
from verl_rc.config.run import RunConfig
from verl_rc.config.sft import SftConfig

CORRECTION = "algorithm.rollout_correction"


def prepared(*overrides: str, options: tuple[str, ...] = ()) -> Prepared:
    return prepare(RunConfig, Composer(parse(options), has_groups=True), overrides)


def test_groups_and_keys_are_distinguished(tmp_path: Path) -> None:
    found = prepared(
        "trainer.seed=1",
        "task=digits",
        "+data.shuffle=False",
        "hydra.searchpath=[a]",
        "~trainer.nnodes",
        "~model",
    )
    assert found.group_choices == ["hydra.searchpath=[a]", "task=digits", "~model"]
    assert found.keys == ["++trainer.seed=1", "++data.shuffle=False", "~trainer.nnodes"]


@pytest.mark.parametrize(
    ("override", "rewritten"),
    [
        (f"{CORRECTION}.rollout_rs=a,b", f"++{CORRECTION}.rollout_rs='a,b'"),
        (f"{CORRECTION}.rollout_is_threshold=0.5_5", f"++{CORRECTION}.rollout_is_threshold='0.5_5'"),
        (
            f"{CORRECTION}.rollout_is_threshold=choice(1,2)",
            f"++{CORRECTION}.rollout_is_threshold=choice(1,2)",
        ),
        (f"{CORRECTION}.rollout_is_threshold=null", f"++{CORRECTION}.rollout_is_threshold=null"),
        (f"{CORRECTION}.preset=a,b", f"++{CORRECTION}.preset=a,b"),
        ("trainer.logger=\"['console']\"", "++trainer.logger=['console']"),
        ("trainer.default_local_dir=~/runs", "++trainer.default_local_dir='~/runs'"),
    ],
)
def test_values_are_read_as_they_were_meant(override: str, rewritten: str) -> None:
    assert prepared(override).keys == [rewritten]
    assert prepared(rewritten).keys == [rewritten]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "harware=cpu",
            r"harware is not a known key or config group; the nearest is the group hardware of async, "
            r".*task\.",
        ),
        (
            "tasks/digits=x",
            "tasks/digits is not a known key or config group; the nearest is the group task of",
        ),
        ("trainr.seed=1", "the nearest is trainer.seed"),
        ("trainr=1", "trainr is not a known key"),
        ("hydra.run.dir=x", "hydra.run.dir=x is refused: a run's files go to trainer.default_local_dir"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib is refused"),
    ],
)
def test_what_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        prepared(override)
    assert "\n" not in str(raised.value)


def test_sft_knows_no_groups() -> None:
    with pytest.raises(ConfigError, match="task is not a known key"):
        prepare(SftConfig, Composer(parse([]), has_groups=False), ["task=digits"])


def test_keys_of_files() -> None:
    check_keys(RunConfig, {"trainer": {"seed": 1}, "data": {"apply_chat_template_kwargs": {"x": {"y": 1}}}})
    with pytest.raises(ConfigError, match=r"trainer\.sed is not a known key"):
        check_keys(RunConfig, {"trainer": {"sed": 1}})


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
    assert (
        correction("algorithm.rollout_correction.rollout_is_threshold=2.0")["rollout_is_threshold"] == "2.0"
    )  # type: ignore[index]
    assert correction("algorithm.rollout_correction.preset=decoupled_seq_is") == {"rollout_is": "sequence"}


def test_a_preset_is_refused_where_a_file_would_undo_it(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "algorithm: {rollout_correction: {rollout_is: token, rollout_is_threshold: '2.0'}}\n"
    )
    arguments = (f"--config-dir={tmp_path}", "-cn=run")
    message = r"must not be undone by a file, .* gives rollout_is: token\. Remove rollout_is from"
    for choice in (
        "correction=decoupled_seq_is",
        "algorithm.rollout_correction.preset=decoupled_seq_is",
        "correction=disabled",
    ):
        with pytest.raises(ConfigError, match=message):
            given(*arguments, choice)
    assert given(*arguments, "correction=decoupled_token_is") == given(*arguments)


def test_the_runs_of_a_sweep() -> None:
    runs = combinations(
        RunConfig, parse(["-m", "trainer.seed=1,2", "correction=icepop,tis", "data.shuffle=False"])
    )
    assert len(runs) == 4
    assert runs[0] == ["correction=icepop", "++trainer.seed=1", "++data.shuffle=False"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  shuffle: [", r"run\.yaml, line 3, must be YAML: while parsing a flow node\."),
        (
            "data: {val_batch_size: '${data.nothing}'}",
            r"be composed: .*nothing.* \(at data\.val_batch_size\)",
        ),
        ("defaults: [task: ghost]", "the configuration cannot be composed: .*task/ghost"),
        ("defaults: [ghost]", "the configuration cannot be composed: .*ghost"),
    ],
)
def test_files_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=message) as raised:
        given(f"--config-dir={tmp_path}", "--config-name=run")
    assert "\n" not in str(raised.value)


ACTOR = {"use_dynamic_bsz": True}
GIVEN = {
    "data": {"train_files": "a", "val_files": "b"},
    "actor_rollout_ref": {"model": {"path": "m"}, "actor": ACTOR},
}


def sentences(**sections: object) -> list[str]:
    given = {**GIVEN, **sections}
    with pytest.raises(ValidationError) as raised:
        RunConfig.model_validate(given)
    return error_sentences(RunConfig, raised.value, given).splitlines()


def test_each_finding_is_a_sentence() -> None:
    assert sentences(trainer={"nnodes": 0, "seed": "x"}) == [
        "trainer.nnodes must be greater than or equal to 1; got 0: write that, or drop it for 1.",
        "trainer.seed must be a valid integer; got 'x': write that, or drop it for 1.",
    ]


def test_a_value_that_another_key_got_wrong_is_named_once() -> None:
    (sentence,) = sentences(data={**GIVEN["data"], "max_response_length": "long"})  # type: ignore[dict-item]
    assert sentence.startswith("data.max_response_length must be a valid integer")


def test_a_section_and_a_missing_key() -> None:
    assert sentences(trainer=3) == [
        "trainer must be a section; got 3: write its keys one by one, trainer.<name>=<value>."
    ]
    assert sentences(data={}) == [
        "data.train_files must be given: write data.train_files=<value>.",
        "data.val_files must be given: write data.val_files=<value>.",
    ]


def test_numbers_have_at_most_64_bits() -> None:
    refuse_huge_numbers({"a": {"b": 2**62, "c": "x", "d": [2**99]}})
    with pytest.raises(ConfigError, match=r"a\.b must be a number of at most 63 bits, got 64; lower it"):
        refuse_huge_numbers({"a": {"b": 2**63}})
