"""Every token at which the engine ends a response is known."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_rc.records.stop_tokens import stop_token_ids


@pytest.mark.parametrize(
    ("file", "listed", "stops"),
    [
        ("generation_config.json", [256, 257], (256, 257)),
        ("generation_config.json", [257, 256], (256, 257)),
        ("generation_config.json", 257, (256, 257)),
        ("generation_config.json", 256, (256,)),
        ("generation_config.json", None, (256,)),
        ("config.json", [257], (256, 257)),
        ("config.json", None, (256,)),
        ("other.json", 257, (256,)),
    ],
)
def test_stop_tokens_are_eos_and_those_that_the_model_lists(
    file: str, listed: Any, stops: tuple[int, ...], tokenizer_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    assert tokenizer.eos_token_id == 256
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    fields = {"model_type": "qwen2"} if file == "config.json" else {}
    (tmp_path / "model" / file).write_text(json.dumps({**fields, "eos_token_id": listed}))
    assert stop_token_ids(tokenizer, str(tmp_path / "model")) == stops


def test_what_generation_config_lists_counts_and_not_what_the_model_lists(
    tokenizer_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    """As in vLLM."""
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2", "eos_token_id": 5}')
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [256, 257]}')
    assert stop_token_ids(tokenizer, str(tmp_path / "model")) == (256, 257)
