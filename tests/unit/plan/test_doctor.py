"""What a run reads is looked at before it starts: each fault planted here is found, and what is right
passes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from planned_runs import config_of
from small_checkpoints import write_tiny_model

from verl_rc.plan.doctor import Inputs, check_data, check_models, check_reward, check_tokenizer
from verl_rc.plan.finding import Finding

ROWS = [
    {
        "prompt": [{"role": "user", "content": "21"}],
        "data_source": "digits",
        "reward_model": {"ground_truth": "12"},
    }
    for _ in range(25)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "model"))


def findings(model: str, folder: Path, rows: Sequence[Any] = ROWS, **given: object) -> Iterator[Finding]:
    """All checks of the inputs of a run with ten prompts a step."""
    (folder / "rows.json").write_text(json.dumps(list(rows)))
    files = {key: str(folder / "rows.json") for key in ("data.train_files", "data.val_files")}
    keys = {name.replace("__", "."): value for name, value in given.items()}
    config, inputs = config_of({"actor_rollout_ref.model.path": model, **files, **keys}), Inputs()
    for check in (check_models, check_tokenizer, check_data, check_reward):
        yield from check(config, inputs)


def by_subject(found: Iterator[Finding]) -> dict[str, Finding]:
    return {finding.subject: finding for finding in found}


def test_what_is_right_passes_and_says_how_far_the_prompts_reach(model: str, tmp_path: Path) -> None:
    found = by_subject(findings(model, tmp_path, trainer__total_epochs=3, trainer__total_training_steps=9))
    assert {finding.status for finding in found.values()} == {"ok"}
    size = found["data.train_files, size"].found
    assert size == "25 prompts, enough for 6 steps in 3 epoch(s), fewer than trainer.total_training_steps=9"
    assert found["reward"].found == "ground truth / empty response of 3 row(s): 1 / 0, 1 / 0, 1 / 0"


def test_steps_that_the_prompts_give_are_not_called_too_few(model: str, tmp_path: Path) -> None:
    found = by_subject(findings(model, tmp_path, trainer__total_epochs=3, trainer__total_training_steps=6))
    assert found["data.train_files, size"].found == "25 prompts, enough for 6 steps in 3 epoch(s)"


@pytest.mark.parametrize(
    ("rows", "given", "subject", "message"),
    [
        (ROWS, {"actor_rollout_ref__model__path": "/nowhere"}, "model", "/nowhere: there is no such folder"),
        (ROWS, {"data__max_prompt_length": 2}, "data.train_files", "longer 100.0%"),
        (ROWS[:9], {}, "data.train_files, size", "9 prompts"),
        ([{"question": "21"}], {}, "data.train_files", "lacks ['prompt', 'data_source', 'reward_model']"),
        ([{**ROWS[0], "prompt": "21"}] * 10, {}, "data.train_files", "must hold a list of chat messages"),
        (
            [{**ROWS[0], "data_source": "ghost"}] * 10,
            {},
            "reward",
            "data_source must be one that has a scorer, got 'ghost'",
        ),
        (
            [*ROWS, {**ROWS[0], "reward_model": {"ground_truth": None}}],
            {},
            "reward",
            f"it is null in row {len(ROWS)} of",
        ),
        (
            ROWS,
            {"reward__custom_reward_function__path": "nowhere.py"},
            "reward",
            "must be an existing Python file",
        ),
    ],
)
def test_a_planted_fault_is_found(
    model: str, tmp_path: Path, rows: Sequence[Any], given: dict[str, object], subject: str, message: str
) -> None:
    found = by_subject(findings(model, tmp_path, rows, **given))[subject]
    assert found.status == "failed"
    assert message in found.found
    assert found.must
    assert found.remedy


def test_a_reward_file_is_looked_at_where_there_are_no_rows(model: str, tmp_path: Path) -> None:
    key = "reward__custom_reward_function__path"
    assert by_subject(findings("/nowhere", tmp_path, **{key: "nowhere.py"}))["reward"].status == "failed"
    mine = tmp_path / "mine.py"
    mine.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 1.0\n"
    )
    found = by_subject(findings("/nowhere", tmp_path, **{key: str(mine)}))["reward"]
    assert (found.status, found.found) == (
        "note",
        f"compute_score of {mine} is there, and was not tried: there are no rows",
    )


@pytest.mark.parametrize(
    ("body", "seconds", "message"),
    [
        ("while True: pass", 0.3, "the reward function did not return, it took longer than 0.3 s"),
        ("import sys; sys.exit(0)", 600, "SystemExit: 0"),
    ],
)
def test_a_reward_that_hangs_or_leaves_is_found(
    model: str, tmp_path: Path, body: str, seconds: float, message: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"def compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n")
    given = {"reward__custom_reward_function__path": str(mine), "reward__timeout_seconds": seconds}
    found = by_subject(findings(model, tmp_path, **given))["reward"]
    assert found.status == "failed"
    assert message in found.found


def test_rows_of_a_class_of_the_users_own_are_looked_at(model: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "class Rows:\n"
        "    def __init__(self, data_files, tokenizer, processor, config):\n        pass\n"
        "    def __len__(self):\n        return 12\n"
        "    def __getitem__(self, index):\n"
        "        if index == 11:\n            raise KeyError(index)\n"
        f"        return {ROWS[0]!r}\n"
    )
    given = {"data__custom_cls__path": str(mine), "data__custom_cls__name": "Rows"}
    found = by_subject(findings(model, tmp_path, **given))["data.train_files"]
    assert (found.status, found.found) == (
        "failed",
        f"Rows of {mine} (data.custom_cls) must give 12 rows, but row 11 raised KeyError(11).",
    )
