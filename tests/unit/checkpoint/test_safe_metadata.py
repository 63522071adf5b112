"""A planted description that would run code is refused, and runs nothing."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from verl_rc.checkpoint.shard_folder import SafeReader, load_full_state_dict, shards_problem
from verl_rc.checkpoint.shards import load_shards, save_shards
from verl_rc.checkpoint.store import CheckpointError


class RunsOnUnpickling:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_shards(tmp_path / "actor", nn.Linear(2, 3), None, {})
    return tmp_path / "actor"


@pytest.mark.parametrize("read", [load_full_state_dict, lambda folder: load_shards(folder, nn.Linear(2, 3), None)])
@pytest.mark.parametrize("function", [os.mkdir, os.system, exec, torch.save], ids=lambda function: function.__name__)
def test_code_in_a_description_is_named_and_not_run(folder: Path, tmp_path: Path, function: Any, read: Any) -> None:
    trace = tmp_path / "trace"
    argument = {"system": f"touch {trace}", "exec": f"open({str(trace)!r}, 'w')"}.get(function.__name__, str(trace))
    (folder / ".metadata").write_bytes(pickle.dumps(RunsOnUnpickling(function, argument)))
    assert "do not trust it" in str(shards_problem(folder))
    with pytest.raises(CheckpointError, match="do not trust it"):
        read(folder)
    assert not trace.exists()


def test_code_beside_a_true_description_is_not_run(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    description: Any = SafeReader(folder).read_metadata()
    description.planner_data = RunsOnUnpickling(os.mkdir, str(trace))
    (folder / ".metadata").write_bytes(pickle.dumps(description))
    assert "mkdir" in str(shards_problem(folder))
    assert not trace.exists()


def test_another_object_is_not_a_description(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    assert "it holds a dict" in str(shards_problem(folder))


def test_what_torch_writes_can_be_read(folder: Path) -> None:
    description = SafeReader(folder).read_metadata()
    assert isinstance(description, Metadata)
    assert set(description.state_dict_metadata) == {"model.weight", "model.bias"}
