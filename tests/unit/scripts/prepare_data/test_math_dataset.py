"""MATH: the content of the last box, verl's format, and the real reward on what was written."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl_rc.algorithm.rewards.scorers import last_boxed

INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."
HALF = {
    "problem": "What is $2/4$?",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": r"It is $\boxed{\frac{1}{2}}$.",
}
SET = {"problem": "Solve $x^2=1$.", "level": "Level 2", "type": "Algebra", "solution": r"$x = \boxed{-1, 1}$"}


@pytest.fixture
def math_dataset(load_script):
    return load_script("math_dataset")


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"$\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"first \boxed{1}, then $\boxed{\text{(A)} {2}}$ {3}", r"\text{(A)} {2}"),
        (r"$\boxed {7}$", "7"),
        (r"so $\boxed 5$ it is $6$", "5"),
        (r"$\boxed\frac{3}{4}$", r"\frac{3}{4}"),
        (r"\boxed{1} and at last $\boxed 2$", "2"),
        (r"\fbox{9}", "9"),
    ],
)
def test_answers(math_dataset, solution, answer):
    assert math_dataset.extract_answer(solution) == answer


@pytest.mark.parametrize(
    "solution", [HALF["solution"], SET["solution"], r"\boxed{1}, $\boxed {\text{(A)} {2}}$ {3}", r"\fbox{9}"]
)
def test_the_reward_reads_the_same_answer_in_a_solution(math_dataset, solution):
    assert last_boxed(solution) == math_dataset.extract_answer(solution)


@pytest.mark.parametrize(
    "solution", ["it is 5", r"\boxed{}", r"\boxed{\frac{1}{2}", r"\boxed{1} and \boxed{2", r"\boxed", ""]
)
def test_a_solution_without_a_closed_box_is_refused(math_dataset, solution):
    with pytest.raises(ValueError, match=r"must hold a \\boxed\{answer\} whose braces close"):
        math_dataset.extract_answer(solution)


def write(math_dataset, write_rows, tmp_path):
    write_rows(tmp_path / "in" / "data" / "train-00000-of-00002.parquet", [HALF])
    write_rows(tmp_path / "in" / "data" / "train-00001-of-00002.parquet", [SET])
    write_rows(tmp_path / "in" / "data" / "test-00000-of-00001.parquet", [HALF])
    math_dataset.main(["--local_dataset_path", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")])
    return tmp_path / "out"


def test_rows_are_in_verls_format(math_dataset, write_rows, tmp_path):
    rows = pq.read_table(write(math_dataset, write_rows, tmp_path) / "train.parquet").to_pylist()
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    assert rows[0] == {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [{"role": "user", "content": f"What is $2/4$? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"\frac{1}{2}"},
        "extra_info": {"split": "train", "index": 0, "answer": HALF["solution"], "question": HALF["problem"]},
    }


def test_the_reward_judges_what_was_written(math_dataset, write_rows, tmp_path, score):
    train = write(math_dataset, write_rows, tmp_path) / "train.parquet"
    assert score(train, 0, r"I get $\boxed{0.5}$") == 1.0
    assert score(train, 0, r"I get $\boxed{\frac12}$") == 1.0
    assert score(train, 0, r"I get $\boxed{\frac{1}{3}}$") == 0.0
    assert score(train, 0, "one half") == 0.0
    assert score(train, 1, SET["solution"]) == 1.0


def test_as_a_script(run_script, tmp_path, write_rows):
    path = write_rows(tmp_path / "all.jsonl", [HALF, SET])
    printed = run_script(
        "math_dataset", "--local_dataset_path", path, "--num_test", 1, "--output_dir", tmp_path
    )
    assert printed == [f"{tmp_path}/train.parquet: 1 problems", f"{tmp_path}/test.parquet: 1 problems"]


def test_no_script_hides_a_module_of_the_standard_library():
    """A script's own folder comes first on its path: a math.py there would be what numpy imports."""
    folder = Path(__file__).parents[4] / "scripts" / "prepare_data"
    assert not {path.stem for path in folder.glob("*.py")} & sys.stdlib_module_names
