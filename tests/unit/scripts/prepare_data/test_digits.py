"""The digit task: right answers, disjoint files, verl's format."""

import pyarrow.parquet as pq
import pytest


@pytest.fixture
def digits(load_script):
    return load_script("digits")


def write(digits, folder, *further):
    sizes = ["--num_train", "50", "--num_val", "20", "--num_sft", "30", "--num_sft_val", "10"]
    digits.main(["--output_dir", str(folder), *sizes, *further])
    return {
        name: pq.read_table(folder / f"{name}.parquet").to_pylist()
        for name in ("train", "val", "sft_train", "sft_val")
    }


@pytest.mark.parametrize(
    ("task", "problem", "answer"),
    [
        ("sort", "4071835926", "0123456789"),
        ("sort", "9909", "0999"),
        ("sum", "40718", "20"),
        ("sum", "000", "0"),
    ],
)
def test_answers(digits, task, problem, answer):
    assert digits.TASKS[task].solve(problem) == answer


def test_rows_are_in_verls_format(digits, tmp_path):
    row = write(digits, tmp_path / "new")["val"][3]
    problem = row["prompt"][0]["content"]
    assert row == {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": problem}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(problem))},
        "extra_info": {"split": "val", "index": 3},
    }
    assert len(problem) == 10


def test_worked_examples_answer_their_question(digits, tmp_path):
    for row in write(digits, tmp_path, "--task", "sum")["sft_train"]:
        question, answer = row["messages"]
        assert (question["role"], answer["role"], len(question["content"])) == ("user", "assistant", 5)
        assert int(answer["content"]) == sum(int(digit) for digit in question["content"])


def test_no_problem_appears_twice_in_any_file(digits, tmp_path):
    files = write(digits, tmp_path, "--length", "3")
    problems = [
        row.get("prompt", row.get("messages"))[0]["content"] for rows in files.values() for row in rows
    ]
    assert len(problems) == 110 == len(set(problems))
    assert {name: len(rows) for name, rows in files.items()} == {
        "train": 50,
        "val": 20,
        "sft_train": 30,
        "sft_val": 10,
    }


def test_equal_seeds_give_equal_files_and_others_do_not(digits, tmp_path):
    one, same = write(digits, tmp_path / "a", "--seed", "4"), write(digits, tmp_path / "b", "--seed", "4")
    assert one == same
    assert one["val"] != write(digits, tmp_path / "c", "--seed", "5")["val"]


def test_too_small_a_space_of_problems_is_refused(digits, tmp_path):
    with pytest.raises(SystemExit, match=r"at least twice as many problems .* got 110 problems of length 2"):
        write(digits, tmp_path, "--length", "2")
    with pytest.raises(SystemExit, match="of length -1"):
        write(digits, tmp_path, "--length", "-1")


def test_the_default_sizes_cannot_be_memorised(digits):
    options = digits.parse_arguments(["--output_dir", "x"])
    assert options.num_train >= 20_000
    assert options.num_val >= 256
    assert 10 ** digits.TASKS["sort"].default_length > 1000 * (options.num_train + options.num_sft)


def test_a_folder_that_cannot_be_written_to_is_refused(digits, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as refused:
        digits.main(["--output_dir", str(tmp_path / "file" / "data")])
    assert refused.value.code == 2
    assert "--output_dir: must be a folder that can be written to" in capsys.readouterr().err
