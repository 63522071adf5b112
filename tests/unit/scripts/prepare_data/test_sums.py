"""The sums of the tools recipe: right answers, no shared problem, and worked examples that the agent loop's
tokens repeat."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

ARGUMENTS = ["--num_train", "40", "--num_val", "10", "--num_sft", "20", "--num_sft_val", "5", "--terms", "3"]


@pytest.fixture
def rows(load_script: Any, tmp_path: Path) -> dict[str, list[dict[str, Any]]]:
    load_script("sums").main(["--output_dir", str(tmp_path), *ARGUMENTS])
    return {path.stem: pq.read_table(path).to_pylist() for path in tmp_path.glob("*.parquet")}


def test_every_answer_is_the_sum(rows: dict[str, list[dict[str, Any]]]) -> None:
    assert {name: len(found) for name, found in rows.items()} == {
        "train": 40,
        "val": 10,
        "sft_train": 30,
        "sft_val": 5,
    }
    for row in rows["train"] + rows["val"]:
        problem = row["prompt"][0]["content"]
        assert len(problem.split("+")) == 3
        assert eval(problem) == int(row["reward_model"]["ground_truth"])


def test_files_share_no_problem(rows: dict[str, list[dict[str, Any]]]) -> None:
    problems = [
        {(row.get("prompt") or row["messages"])[0]["content"] for row in found} for found in rows.values()
    ]
    assert sum(map(len, problems)) == len(set.union(*problems)) == 75


def test_a_share_of_the_worked_examples_calls_the_tool(rows: dict[str, list[dict[str, Any]]]) -> None:
    kinds: dict[tuple[str, ...], int] = {}
    for row in rows["sft_train"]:
        roles = tuple(message["role"] for message in row["messages"])
        called = "tool" if "<tool>" in row["messages"][1]["content"] else "none"
        kinds[(*roles, called)] = kinds.get((*roles, called), 0) + 1
        problem, last = row["messages"][0]["content"], row["messages"][-1]["content"]
        assert last in (str(eval(problem)), f"<tool>{problem}</tool>")
        assert len(roles) == 2 or row["messages"][2]["content"] == last
    assert kinds == {
        ("user", "assistant", "none"): 10,
        ("user", "assistant", "tool"): 10,
        ("user", "assistant", "tool", "assistant", "tool"): 10,
    }


def test_too_few_sums_end_with_one_sentence(load_script: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sums\.py: --terms and --largest must give at least twice"):
        load_script("sums").main(["--output_dir", str(tmp_path), *ARGUMENTS, "--largest", "3"])
