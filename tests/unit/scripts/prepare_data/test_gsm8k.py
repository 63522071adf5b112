"""GSM8K: the number after ####, verl's format, and the real reward on what was written."""

import pyarrow.parquet as pq
import pytest

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
APPLES = {"question": "Ann has 2 apples and buys 3. How many?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}
POPULATION = {"question": "How many people?", "answer": "It is 1,200 x 1,000.\n#### 1,200,000"}


@pytest.fixture
def gsm8k(load_script):
    return load_script("gsm8k")


@pytest.fixture
def local_copy(tmp_path, write_rows):
    folder = tmp_path / "gsm8k"
    write_rows(folder / "main" / "train-00000-of-00001.parquet", [APPLES, POPULATION])
    write_rows(folder / "main" / "test-00000-of-00001.parquet", [POPULATION])
    write_rows(folder / "socratic" / "train-00000-of-00001.parquet", [APPLES])
    return folder


@pytest.mark.parametrize(
    ("solution", "answer"),
    [("#### 5", "5"), ("x\n#### 1,234,567", "1234567"), ("#### 1 then #### -7 ", "-7"), ("#### 2.5", "2.5")],
)
def test_answers(gsm8k, solution, answer):
    assert gsm8k.extract_answer(solution) == answer


@pytest.mark.parametrize(
    "solution", ["the answer is 5", "####", "#### five", "#### nan", "#### 5 apples", "5 ####"]
)
def test_a_solution_without_a_number_at_its_end_is_refused(gsm8k, solution):
    with pytest.raises(ValueError, match="must end in #### and a number"):
        gsm8k.extract_answer(solution)


def test_rows_are_in_verls_format(gsm8k, local_copy, tmp_path):
    gsm8k.main(["--local_dataset_path", str(local_copy), "--output_dir", str(tmp_path / "out")])
    train, test = (
        pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in ("train", "test")
    )
    assert (len(train), len(test)) == (2, 1)
    assert train[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"How many people? {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1200000"},
        "extra_info": {"split": "train", "index": 1, **POPULATION},
    }
    assert test[0]["extra_info"]["split"] == "test"


def test_the_reward_judges_what_was_written(gsm8k, local_copy, tmp_path, score):
    gsm8k.main(["--local_dataset_path", str(local_copy), "--output_dir", str(tmp_path)])
    train = tmp_path / "train.parquet"
    assert score(train, 1, "So there are\n#### 1,200,000") == 1.0
    assert score(train, 1, "#### 1200000") == 1.0
    assert score(train, 1, "#### 1200") == 0.0
    assert score(train, 1, "1200000") == 0.0
    assert score(train, 0, APPLES["answer"]) == 1.0


def test_as_a_script(run_script, local_copy, tmp_path):
    printed = run_script("gsm8k", "--local_dataset_path", local_copy, "--output_dir", tmp_path)
    assert printed == [f"{tmp_path}/train.parquet: 2 problems", f"{tmp_path}/test.parquet: 1 problems"]


def test_a_row_without_an_answer_is_named_and_nothing_is_written(gsm8k, write_rows, tmp_path):
    write_rows(tmp_path / "in" / "train.jsonl", [APPLES])
    write_rows(tmp_path / "in" / "test.jsonl", [APPLES, {"question": "q", "answer": "it is five"}])
    with pytest.raises(
        SystemExit, match=r"must end in #### .* row 1 of the test split, whose answer ends in 'it is five'"
    ):
        gsm8k.main(["--local_dataset_path", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
