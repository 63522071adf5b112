"""A folder of shards is read without a model; a planted description that would run code is refused, and runs
nothing."""

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.optim import SGD

from verl_rc.runtime.checkpoint.shard_folder import (
    SafeReader,
    ShardHeader,
    load_full_state_dict,
    shards_problem,
)
from verl_rc.runtime.checkpoint.shards import collect_shards, load_shards, write_shards
from verl_rc.runtime.checkpoint.store import CheckpointError


def write(model: nn.Module, folder: Path) -> Path:
    write_shards(folder, collect_shards(model, SGD(model.parameters()), {}))
    return folder


def load(folder: Path) -> None:
    model = nn.Linear(2, 3)
    load_shards(folder, model, SGD(model.parameters()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    return write(nn.Linear(2, 3, dtype=torch.bfloat16), tmp_path / "actor")


def test_whole_tensors_without_a_group(folder: Path) -> None:
    torch.manual_seed(0)
    expected = nn.Linear(2, 3, dtype=torch.bfloat16).state_dict()
    found = load_full_state_dict(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert found["weight"].dtype == torch.bfloat16


def test_reading_says_nothing(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    load_full_state_dict(folder)
    assert shards_problem(folder) is None
    assert [str(warning.message) for warning in recwarn] == []


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: folder.rename(folder.with_name("other")), "shards.json is missing"),
    (lambda folder: (folder / "shards.json").unlink(), "shards.json is missing"),
    (lambda folder: (folder / "shards.json").write_text("{"), "must be a JSON file"),
    (lambda folder: (folder / "shards.json").write_text('{"extra": {}}'), "and nothing else"),
    (lambda folder: (folder / ".metadata").unlink(), "must hold readable shards, but FileNotFoundError"),
    (lambda folder: (folder / ".metadata").write_bytes(b"nonsense"), "must hold readable shards, but"),
    (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp"),
    (
        lambda folder: (folder / "__0_0.distcp").write_bytes(b"short"),
        "__0_0.distcp must have 3154 bytes, got 5",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_what_cannot_be_read_has_a_reason(folder: Path, damage: Callable[[Path], Any], said: str) -> None:
    damage(folder)
    assert said in str(shards_problem(folder))


@pytest.mark.parametrize("damage", [damage for damage, _ in DAMAGES])
def test_reading_it_anyway_is_one_error(folder: Path, damage: Callable[[Path], Any]) -> None:
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        load_full_state_dict(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_a_header_is_written_once_and_is_json(tmp_path: Path) -> None:
    header = ShardHeader(True, ["a"], [0.1], {"scheduler": {"num_steps": 3}})
    header.write(tmp_path)
    assert ShardHeader.read(tmp_path) == header
    with pytest.raises(CheckpointError, match="written into a new folder"):
        header.write(tmp_path)
    for extra in ({"loss": math.inf}, {"tensor": torch.ones(1)}):
        with pytest.raises(CheckpointError, match="extra must be plain JSON"):
            ShardHeader(True, [], [], extra).write(tmp_path)


class RunsOnUnpickling:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def planted_folder(tmp_path: Path) -> Path:
    return write(nn.Linear(2, 3), tmp_path / "actor")


@pytest.mark.parametrize("read", [load_full_state_dict, load])
@pytest.mark.parametrize(
    "function", [os.mkdir, os.system, exec, torch.save], ids=lambda function: function.__name__
)
def test_code_in_a_description_is_named_and_not_run(
    planted_folder: Path, tmp_path: Path, function: Any, read: Any
) -> None:
    trace = tmp_path / "trace"
    argument = {"system": f"touch {trace}", "exec": f"open({str(trace)!r}, 'w')"}.get(
        function.__name__, str(trace)
    )
    (planted_folder / ".metadata").write_bytes(pickle.dumps(RunsOnUnpickling(function, argument)))
    assert "do not trust it" in str(shards_problem(planted_folder))
    with pytest.raises(CheckpointError, match="do not trust it"):
        read(planted_folder)
    assert not trace.exists()


def test_code_beside_a_true_description_is_not_run(planted_folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    description: Any = SafeReader(planted_folder).read_metadata()
    description.planner_data = RunsOnUnpickling(os.mkdir, str(trace))
    (planted_folder / ".metadata").write_bytes(pickle.dumps(description))
    assert "mkdir" in str(shards_problem(planted_folder))
    assert not trace.exists()


def test_another_object_is_not_a_description(planted_folder: Path) -> None:
    (planted_folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    assert "it holds a dict" in str(shards_problem(planted_folder))


def test_what_torch_writes_can_be_read(planted_folder: Path) -> None:
    description = SafeReader(planted_folder).read_metadata()
    assert isinstance(description, Metadata)
    assert set(description.state_dict_metadata) == {"model.weight", "model.bias"}
