"""One process: what is written is what was there when the save began. Two ranks are in tests/integration/test_shards.py."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim import AdamW

from verl_rc.checkpoint import shards_problem
from verl_rc.checkpoint.shards import BackgroundWriter, collect_shards, load_shards, save_shards
from verl_rc.checkpoint.store import CheckpointError


class Learner:
    """A model that learns random numbers."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 3)
        self.optimizer = AdamW(self.model.parameters(), lr=0.1)

    def train(self, steps: int) -> "Learner":
        for _ in range(steps):
            self.model(torch.rand(4, 3)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def start(self, writer: BackgroundWriter, folder: Path) -> "Learner":
        writer.start(folder, collect_shards(self.model, self.optimizer, {"any": 1}))
        return self

    def load(self, folder: Path) -> "Learner":
        assert load_shards(folder, self.model, self.optimizer) == {"any": 1}
        return self

    def weight(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes nothing until the event is set."""
    ready, write = threading.Event(), FileSystemWriter.write_data

    def waiting(*arguments: Any) -> Any:
        assert ready.wait(600)
        return write(*arguments)

    monkeypatch.setattr(FileSystemWriter, "write_data", waiting)
    return ready


def test_what_is_written_is_what_was_saved_whatever_is_learned_meanwhile(tmp_path: Path, disk: threading.Event) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1).train(3)
    assert writer.has_ended(wait=True)
    learner.start(writer, tmp_path / "actor")
    learner.train(3)
    assert not writer.has_ended(wait=False)
    assert shards_problem(tmp_path / "actor") is not None
    disk.set()
    assert writer.has_ended(wait=True)
    assert torch.equal(Learner(2).train(1).load(tmp_path / "actor").train(3).weight(), learner.weight())


def test_a_second_save_waits_for_the_first_and_takes_nothing_from_it(tmp_path: Path, disk: threading.Event) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1)
    weights = []
    for name in ("one", "two"):
        weights.append(learner.train(1).weight())
        learner.start(writer, tmp_path / name)
        threading.Timer(0.2, disk.set).start()
        learner.train(1)
    assert writer.has_ended(wait=True)
    for name, weight in zip(("one", "two"), weights, strict=True):
        assert torch.equal(Learner(2).load(tmp_path / name).weight(), weight)


def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1).train(1)
    learner.start(writer, tmp_path / "beside")
    assert writer.has_ended(wait=True)
    save_shards(tmp_path / "waited", learner.model, learner.optimizer, {"any": 1})
    one, two = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("beside", "waited"))
    assert one == two


def wait_for(writer: BackgroundWriter) -> bool:
    """Until the thread has ended, without asking for how."""
    assert writer._writing is not None
    return writer._writing.exception(30) is not None


@pytest.mark.parametrize("wait", [True, False])
def test_a_failure_is_told_once_and_is_the_one_of_a_save_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    writer, learner = BackgroundWriter(pin_memory=False), Learner(1)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(CheckpointError) as waited:
            save_shards(tmp_path / "waited", learner.model, learner.optimizer, {})
        learner.start(writer, tmp_path / "beside")
        assert wait or wait_for(writer)
        with pytest.raises(CheckpointError) as beside:
            writer.has_ended(wait)
    assert str(beside.value) == str(waited.value).replace("waited", "beside")
    assert "OSError: No space left on device" in str(beside.value)
    assert writer.has_ended(wait=False)
    learner.start(writer, tmp_path / "again")
    assert writer.has_ended(wait=True)
