"""What both benchmarks share: files by the name of their split, rows held out, and errors that say what to
do."""

import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError


@pytest.fixture
def conversion(load_script):
    return load_script("conversion")


@pytest.fixture
def benchmark_of_letters(conversion):
    return conversion.Benchmark(
        data_source="letters",
        subset="main",
        question_column="question",
        solution_column="solution",
        instruction="Answer.",
        extract_answer=str.upper,
    )


def rows(letters):
    return [{"question": f"{letter}?", "solution": letter} for letter in letters]


@pytest.fixture
def run(conversion, benchmark_of_letters, tmp_path):
    """Converts and returns the ground truths of both files as strings."""

    def convert(path, *further):
        given = [] if path is None else ["--local_dataset_path", str(path)]
        conversion.prepare(
            benchmark_of_letters, None, ["--output_dir", str(tmp_path / "out"), *given, *further]
        )
        tables = [
            pq.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist() for split in ("train", "test")
        ]
        return ["".join(row["reward_model"]["ground_truth"] for row in table) for table in tables]

    return convert


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_folder_is_read_by_file_names_in_order(run, write_rows, tmp_path, suffix):
    folder = tmp_path / "in" / "nested"
    write_rows(folder / f"train-1{suffix}", rows("cd"))
    write_rows(folder / f"train-0{suffix}", rows("ab"))
    write_rows(folder / f"test{suffix}", rows("e"))
    write_rows(folder / f"notes{suffix}", rows("z"))
    assert run(tmp_path / "in") == ["ABCD", "E"]


def test_the_subset_of_a_hub_copy_is_taken_alone(run, write_rows, tmp_path):
    for subset, letters in {"main": "ab", "other": "xy"}.items():
        for split, letter in zip(("train", "test"), letters, strict=True):
            write_rows(tmp_path / "in" / subset / f"{split}.parquet", rows(letter))
    assert run(tmp_path / "in") == ["A", "B"]


def test_rows_held_out_are_random_disjoint_and_repeatable(run, write_rows, tmp_path):
    path = write_rows(tmp_path / "all.parquet", rows("abcdefghij"))
    train, test = run(path, "--num_test", "4")
    assert sorted(train + test) == sorted("ABCDEFGHIJ")
    assert (len(test), list(train), list(test)) == (4, sorted(train), sorted(test))
    assert run(path, "--num_test", "4") == [train, test]
    assert any(run(path, "--num_test", "4", "--seed", str(seed))[1] != test for seed in (2, 3, 4))


@pytest.mark.parametrize("further", [(), ("--num_test", "0"), ("--num_test", "2")])
def test_a_single_file_needs_rows_to_hold_out(run, write_rows, tmp_path, further):
    path = write_rows(tmp_path / "all.parquet", rows("ab"))
    with pytest.raises(SystemExit, match=r"letters: the data has 2 rows and no test split: pass --num_test"):
        run(path, *further)


def test_a_folder_without_files_of_a_split_is_refused_with_what_it_holds(run, write_rows, tmp_path):
    write_rows(tmp_path / "in" / "problems.parquet", rows("a"))
    with pytest.raises(
        SystemExit, match=r"must hold files named train\* and test\* .*\['problems.parquet'\]"
    ):
        run(tmp_path / "in")
    with pytest.raises(SystemExit, match="nowhere is not there"):
        run(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["broken.parquet", "broken.jsonl"])
def test_an_unreadable_file_is_named(run, tmp_path, name):
    (tmp_path / name).write_text("{no data")
    with pytest.raises(SystemExit, match=rf"must be parquet or .jsonl .*{name} cannot be read"):
        run(tmp_path / name, "--num_test", "1")


@pytest.mark.parametrize(
    "row", [{"question": "q"}, {"question": "q", "solution": None}, {"question": "q", "solution": " "}]
)
def test_a_missing_column_or_value_is_named(run, write_rows, tmp_path, row):
    write_rows(tmp_path / "in" / "train.jsonl", rows("ab"))
    write_rows(tmp_path / "in" / "test.jsonl", [*rows("c"), row])
    with pytest.raises(
        SystemExit, match=r"columns \['question', 'solution'\], row 1 of the test split lacks 'solution'"
    ):
        run(tmp_path / "in")


def test_without_a_local_copy_the_hub_is_asked_for_data_set_and_subset(
    run, write_rows, conversion, monkeypatch, tmp_path
):
    """The layout is that of the hub's branch with parquet files."""
    hub = tmp_path / "hub"
    for split, letters in {"train": "ab", "test": "c"}.items():
        write_rows(hub / "main" / split / "0000.parquet", rows(letters))
    write_rows(hub / "main" / "validation" / "0000.parquet", rows("z"))
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(hub)

    monkeypatch.setattr(conversion, "snapshot_download", download)
    assert run(None) == ["AB", "C"]
    wanted = {
        "revision": "refs/convert/parquet",
        "allow_patterns": "main/*/*.parquet",
        "repo_type": "dataset",
    }
    assert asked == [("letters", wanted)]


def test_without_the_hub_the_message_says_what_to_pass(run, conversion, monkeypatch):
    def refuse(*_, **__):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(conversion, "snapshot_download", refuse)
    with pytest.raises(SystemExit, match=r"no connection. Pass a local copy with --local_dataset_path"):
        run(None)
