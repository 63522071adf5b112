"""Loads the scripts that prepare data the way Python runs them: with their own folder first on the path."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

FOLDER = Path(__file__).parents[4] / "scripts" / "prepare_data"
MODULES = [path.stem for path in FOLDER.glob("*.py")]


@pytest.fixture
def load_script(monkeypatch):
    """``load_script("gsm8k")`` is the module of that script; nothing stays importable after the test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in MODULES:
        sys.modules.pop(name, None)
    yield importlib.import_module
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def run_script():
    """``run_script("gsm8k", ...)`` runs it in a process of its own, as a user does, and returns the lines it
    prints."""

    def run(name, *arguments):
        command = [sys.executable, str(FOLDER / f"{name}.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    return run


@pytest.fixture
def write_rows():
    """Writes records to a parquet or JSON-lines file and returns its path; makes its folder."""

    def write(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The tiny model's tokenizer: one token per byte."""
    import make_tiny_model

    from verl_rc.records.tokenize import load_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_model.build_tokenizer(1024).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return load_tokenizer(str(folder))


@pytest.fixture
def score(tokenizer):
    """``score(path, index, response)``: a response to row ``index`` of a written file, judged by the reward
    of its source."""
    from verl_rc.algorithm.rewards import RewardSample, build_reward
    from verl_rc.config.task import DataConfig, RewardConfig
    from verl_rc.records.dataset import PromptDataset

    reward = build_reward(RewardConfig())

    def judge(path, index, response):
        files = [str(path)]
        data = DataConfig(
            train_files=files, val_files=files, max_prompt_length=1024, gen_batch_size=1, seed=1
        )
        dataset = PromptDataset(files, tokenizer, data)
        return reward(RewardSample.from_row(dataset[index], response)).score

    return judge
