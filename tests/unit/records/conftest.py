"""A small byte-level tokenizer and data files for the tests of this folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from make_tiny_model import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny model's tokenizer: one token per byte, "=" after the question."""
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(1024).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    from verl_rc.records.tokenize import load_tokenizer

    return load_tokenizer(str(tokenizer_folder))


def prompt_record(question: str, **changes: Any) -> dict[str, Any]:
    """One row in verl's format."""
    return {
        "data_source": "digits",
        "prompt": [{"role": "user", "content": question}],
        "ability": "sort",
        "reward_model": {"style": "rule", "ground_truth": question[::-1]},
        "extra_info": {"index": 0},
        **changes,
    }


@pytest.fixture
def write_parquet(tmp_path: Path) -> Callable[..., str]:
    """Write records to a parquet file and return its path."""

    def write(records: list[dict[str, Any]], name: str = "data.parquet") -> str:
        path = tmp_path / name
        pq.write_table(pa.Table.from_pylist(records), path)
        return str(path)

    return write


@pytest.fixture
def record() -> Callable[..., dict[str, Any]]:
    """Makes one row in verl's format from a question."""
    return prompt_record
