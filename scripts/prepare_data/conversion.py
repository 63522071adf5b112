"""From files of questions and worked solutions to train.parquet and test.parquet in verl's format."""

import argparse
import json
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import snapshot_download

from verl_rc.config.paths import output_folder

Row = dict[str, Any]
SPLITS = ("train", "test")
SUFFIXES = (".parquet", ".jsonl")
_CONVERTED = "refs/convert/parquet"
"""The hub's branch with a data set as parquet files (huggingface.co/docs/dataset-viewer/parquet)."""


@dataclass(frozen=True)
class Benchmark:
    """A public data set of questions with worked solutions, and how its rows become prompts."""

    data_source: str
    """Hub id; also the name under which the rows are scored."""
    subset: str
    """Configuration on the hub; in a local copy the folder of that name, where there is one."""
    question_column: str
    solution_column: str
    instruction: str
    """Follows the question: how to reason, and where to put the answer."""
    extract_answer: Callable[[str], str]
    """From a worked solution to the ground truth. Raises ``ValueError`` saying what the solution must hold.
    """


def read_rows(path: Path) -> list[Row]:
    """The rows of a parquet or JSON-lines file. Raises ``ValueError`` naming the file when it cannot be
    read."""
    try:
        if path.suffix == ".parquet":
            return pq.read_table(path).to_pylist()
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ValueError(
            f"a data file must be parquet or .jsonl (one record per line), {path} cannot be read: {error}"
        ) from error


def read_local(path: Path, subset: str) -> dict[str, list[Row]]:
    """The rows of every split found under ``path``; the rows of a single file are all called ``train``.

    In a folder the names of files, or of the folders that they are in, say which split they belong to:
    ``train*`` or ``test*``, at any depth.
    Raises ``ValueError`` when ``path`` is not there or holds no such file.
    """
    if path.is_file():
        return {"train": read_rows(path)}
    if not path.is_dir():
        raise ValueError(f"--local_dataset_path must name a file or a folder, {path} is not there.")
    root = path / subset if (path / subset).is_dir() else path
    files = [file for file in sorted(root.rglob("*")) if file.suffix in SUFFIXES]
    split_files = {
        split: [
            file for file in files if any(name.startswith(split) for name in file.relative_to(root).parts)
        ]
        for split in SPLITS
    }
    if not split_files["train"]:
        raise ValueError(
            f"--local_dataset_path must hold files named train* and test* ({' or '.join(SUFFIXES)}), {root} "
            f"holds {[str(file.relative_to(root)) for file in files[:10]]}. Rename them, or name a single "
            "file."
        )
    return {
        split: [row for file in paths for row in read_rows(file)]
        for split, paths in split_files.items()
        if paths
    }


def read_hub(benchmark: Benchmark) -> dict[str, list[Row]]:
    """The rows of both splits from the Hugging Face hub. Raises ``ValueError`` when they cannot be had.

    The hub converts each public data set to files ``<subset>/<split>/<number>.parquet``.
    """
    try:
        copy = snapshot_download(
            benchmark.data_source,
            repo_type="dataset",
            revision=_CONVERTED,
            allow_patterns=f"{benchmark.subset}/*/*.parquet",
        )
    except OSError as error:
        raise ValueError(
            f"the hub does not give the data: {error}. Pass a local copy with --local_dataset_path."
        ) from error
    return read_local(Path(copy), benchmark.subset)


def hold_out(rows: list[Row], num_test: int | None, seed: int) -> dict[str, list[Row]]:
    """Share out rows that came without a test split: ``num_test`` random ones become it, both keep their
    order."""
    if num_test is None or not 0 < num_test < len(rows):
        raise ValueError(
            f"the data has {len(rows)} rows and no test split: pass --num_test=<fewer rows, at least 1>, or "
            f"give a folder with train* and test* files; got --num_test={num_test}."
        )
    held_out = set(random.Random(seed).sample(range(len(rows)), num_test))
    return {
        "train": [row for index, row in enumerate(rows) if index not in held_out],
        "test": [row for index, row in enumerate(rows) if index in held_out],
    }


def convert_row(row: Row, benchmark: Benchmark, split: str, index: int) -> Row:
    """One row in verl's format. Raises ``ValueError`` naming the row when a column is missing or holds no
    answer."""
    place = f"row {index} of the {split} split"
    columns = (benchmark.question_column, benchmark.solution_column)
    for column in columns:
        if not isinstance(row.get(column), str) or not row[column].strip():
            raise ValueError(
                f"rows must have text in the columns {list(columns)}, {place} lacks {column!r}; it has "
                f"{list(row)}."
            )
    question, solution = (row[column] for column in columns)
    try:
        ground_truth = benchmark.extract_answer(solution)
    except ValueError as error:
        raise ValueError(
            f"{error} This is {place}, whose {benchmark.solution_column} ends in {solution[-80:]!r}."
        ) from None
    return {
        "data_source": benchmark.data_source,
        "prompt": [{"role": "user", "content": f"{question} {benchmark.instruction}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, "answer": solution, "question": question},
    }


def write_splits(splits: dict[str, Iterable[Row]], benchmark: Benchmark, output_dir: Path) -> None:
    """Convert every split before the first is written, so that a bad row leaves no half-made data set."""
    tables = {
        split: pa.Table.from_pylist(
            [convert_row(row, benchmark, split, index) for index, row in enumerate(rows)]
        )
        for split, rows in splits.items()
    }
    output_dir.mkdir(parents=True, exist_ok=True)
    for split, table in tables.items():
        path = output_dir / f"{split}.parquet"
        pq.write_table(table, path)
        print(f"{path}: {table.num_rows} problems")


def parse_arguments(description: str | None, arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder to write to; made if missing"
    )
    parser.add_argument(
        "--local_dataset_path",
        type=Path,
        default=None,
        help="folder with train* and test* files, or one file (default: the hub)",
    )
    parser.add_argument(
        "--num_test", type=int, default=None, help="rows to hold out when there is no test split"
    )
    parser.add_argument("--seed", type=int, default=1, help="chooses the rows held out")
    return parser.parse_args(arguments)


def prepare(benchmark: Benchmark, description: str | None, arguments: list[str] | None = None) -> None:
    """Read the benchmark as the command line says and write both files; exits with one sentence when that
    cannot be."""
    options = parse_arguments(description, arguments)
    try:
        if options.local_dataset_path is None:
            splits = read_hub(benchmark)
        else:
            splits = read_local(options.local_dataset_path.expanduser(), benchmark.subset)
        if "test" not in splits:
            splits = hold_out(splits["train"], options.num_test, options.seed)
        write_splits(splits, benchmark, options.output_dir)
    except ValueError as error:
        raise SystemExit(f"{benchmark.data_source}: {error}") from None
