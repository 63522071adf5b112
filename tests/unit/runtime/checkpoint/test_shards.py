"""One process, without a group: what is saved comes back, written at once or beside the training.

Sharded models on two ranks are in tests/integration/test_shards.py.
"""

import io
import resource
import threading
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim import AdamW, Optimizer

from verl_rc.runtime.checkpoint import shards
from verl_rc.runtime.checkpoint.shard_folder import ShardHeader, shards_problem
from verl_rc.runtime.checkpoint.shards import (
    BackgroundWriter,
    collect_shards,
    get_random_state,
    is_frozen,
    load_shards,
    named_tensors,
    read_random_state,
    set_random_state,
    write_shards,
)
from verl_rc.runtime.checkpoint.store import CheckpointError


def save_shards(
    folder: Path, model: nn.Module, optimizer: Optimizer, extra: dict[str, Any], **options: Any
) -> None:
    write_shards(folder, collect_shards(model, optimizer, extra, **options))


def build(seed: int, width: int = 3, layers: int = 2) -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, AdamW(model.parameters(), lr=0.1)


def train(model: nn.Sequential, optimizer: AdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.rand(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


class TwoRanks:
    """``torch.distributed`` on rank 0 of two, whose peer does not fail."""

    problems: tuple[str | None, ...] = ()

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return 2

    def get_rank(self) -> int:
        return 0

    def all_gather_object(self, problems: list[str | None], problem: str | None, group: Any) -> None:
        problems[:] = self.problems = (problem, None)


def test_a_failure_of_any_type_reaches_the_other_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that raised past the collective would leave its peers waiting in it."""
    ranks = TwoRanks()
    monkeypatch.setattr(shards, "dist", ranks)
    monkeypatch.setattr(shards, "read_metadata", lambda folder: {}["no such key"])
    model, optimizer = build(1)
    ShardHeader(False, [], [], {}).write(tmp_path)
    with pytest.raises(CheckpointError, match="KeyError"):
        load_shards(tmp_path, model, optimizer)
    assert ranks.problems == ("KeyError('no such key')", None)


@pytest.mark.parametrize("steps_before", [0, 3])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, steps_before: int) -> None:
    model, optimizer = build(1)
    train(model, optimizer, steps_before)
    save_shards(tmp_path / "actor", model, optimizer, {"any": [1, "x"]})
    assert len(optimizer.state) == (4 if steps_before else 0)
    train(model, optimizer, 3)

    resumed, resumed_optimizer = build(2)
    train(resumed, resumed_optimizer, 1)
    assert load_shards(tmp_path / "actor", resumed, resumed_optimizer) == {"any": [1, "x"]}
    train(resumed, resumed_optimizer, 3)
    assert all(torch.equal(resumed.state_dict()[name], value) for name, value in model.state_dict().items())


def test_frozen_parameters_stay_those_of_the_base_model(tmp_path: Path) -> None:
    model, optimizer = build(1)
    model[0].requires_grad_(False)
    save_shards(tmp_path / "lora", model, optimizer, {}, leave_out_frozen=True)
    other, other_optimizer = build(2)
    other[0].requires_grad_(False)
    base = other[0].weight.clone()
    load_shards(tmp_path / "lora", other, other_optimizer)
    assert torch.equal(other[0].weight, base)
    assert torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(CheckpointError, match=r"it lacks 0\.bias, 0\.weight"):
        load_shards(tmp_path / "lora", *build(3))


def test_names_of_another_model_are_listed_up_to_five(tmp_path: Path) -> None:
    model, optimizer = build(1, layers=2)
    save_shards(tmp_path / "actor", model, optimizer, {})
    deeper, deeper_optimizer = build(1, layers=5)
    with pytest.raises(CheckpointError) as caught:
        load_shards(tmp_path / "actor", deeper, deeper_optimizer)
    assert "it lacks 2.bias, 2.weight, 3.bias, 3.weight, 4.bias and 1 more;" in str(caught.value)
    assert "its optimizer does not step 2.bias" in str(caught.value)
    assert "trainer.resume_mode=disable" in str(caught.value)


def test_an_optimizer_of_other_parameters(tmp_path: Path) -> None:
    model, optimizer = build(1)
    save_shards(tmp_path / "actor", model, optimizer, {})
    with pytest.raises(CheckpointError, match=r"its optimizer steps in addition 0\.bias, 0\.weight\."):
        load_shards(tmp_path / "actor", model, AdamW(model[1].parameters()))
    groups = AdamW([{"params": layer.parameters()} for layer in model])
    with pytest.raises(CheckpointError, match=r"its optimizer has 1 parameter group\(s\) instead of 2"):
        load_shards(tmp_path / "actor", model, groups)


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    model, optimizer = build(1)
    save_shards(tmp_path / "actor", model, optimizer, {})
    with pytest.raises(CheckpointError, match="written into a new folder"):
        save_shards(tmp_path / "actor", model, optimizer, {})


def test_a_broken_shard_is_one_error(tmp_path: Path) -> None:
    model, optimizer = build(1)
    save_shards(tmp_path / "actor", model, optimizer, {})
    shard = tmp_path / "actor" / "__0_0.distcp"
    shard.write_bytes(bytes(shard.stat().st_size))
    with pytest.raises(CheckpointError, match=r"reading the shards in .* first rank 0 with") as caught:
        load_shards(tmp_path / "actor", model, optimizer)
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match=r"writing the shards in .*OSError: No space left") as caught:
        save_shards(tmp_path / "actor", *build(1), {})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_takes_a_part_is_one_error(tmp_path: Path, beside: bool) -> None:
    model, optimizer = build(1, layers=50)
    writer, limits = BackgroundWriter(pin_memory=False), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (20_000, limits[1])
    )  # largest file, bytes; the random state has 5,000
    try:
        if beside:
            writer.start(tmp_path / "actor", collect_shards(model, optimizer, {}))
        with pytest.raises(
            CheckpointError, match=r"writing the shards in .*OSError: \[Errno 27\] File too large"
        ) as caught:
            writer.is_finished(wait=True) if beside else save_shards(tmp_path / "actor", model, optimizer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(caught.value).splitlines()) == 1
    assert (tmp_path / "actor" / "__0_0.distcp").stat().st_size == 20_000
    assert shards_problem(tmp_path / "actor") is not None


def test_names_are_of_shared_tensors_the_first_and_of_saved_buffers_too() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    model[1].weight = model[0].weight
    model.register_buffer("scratch", torch.ones(1), persistent=False)
    assert set(named_tensors(model)) == {
        "0.weight",
        "2.weight",
        "2.bias",
        "2.running_mean",
        "2.running_var",
        "2.num_batches_tracked",
    }


def test_only_parameters_are_frozen() -> None:
    assert is_frozen(nn.Parameter(torch.ones(1), requires_grad=False))
    assert not is_frozen(nn.Parameter(torch.ones(1)))
    assert not is_frozen(torch.ones(1))


def test_the_generator_goes_on(tmp_path: Path) -> None:
    torch.manual_seed(3)
    torch.save(get_random_state(), tmp_path / "state.pt")
    expected = torch.rand(4)
    torch.manual_seed(4)
    set_random_state(read_random_state(tmp_path / "state.pt"))
    assert torch.equal(torch.rand(4), expected)


def test_no_file_changes_nothing(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    set_random_state(read_random_state(tmp_path / "nowhere.pt"))
    assert torch.equal(torch.get_rng_state(), before)


def of_zip(pickled: bytes) -> bytes:
    """torch's file of one pickle."""
    file = io.BytesIO()
    with ZipFile(file, "w") as archive:
        archive.writestr("state/data.pkl", pickled)
        archive.writestr("state/version", "3")
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK", b"nothing", of_zip(b"\x80\x02h\x05.")])
def test_a_broken_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt must hold random states"):
        read_random_state(tmp_path / "state.pt")


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


def test_later_training_does_not_change_what_is_written(tmp_path: Path, disk: threading.Event) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1).train(3)
    assert writer.is_finished(wait=True)
    learner.start(writer, tmp_path / "actor")
    learner.train(3)
    assert not writer.is_finished(wait=False)
    assert shards_problem(tmp_path / "actor") is not None
    disk.set()
    assert writer.is_finished(wait=True)
    assert torch.equal(Learner(2).train(1).load(tmp_path / "actor").train(3).weight(), learner.weight())


def test_a_second_save_waits_for_the_first_and_takes_nothing_from_it(
    tmp_path: Path, disk: threading.Event
) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1)
    weights = []
    for name in ("one", "two"):
        weights.append(learner.train(1).weight())
        learner.start(writer, tmp_path / name)
        threading.Timer(0.2, disk.set).start()
        learner.train(1)
    assert writer.is_finished(wait=True)
    for name, weight in zip(("one", "two"), weights, strict=True):
        assert torch.equal(Learner(2).load(tmp_path / name).weight(), weight)


def test_the_files_are_those_of_a_save_that_is_waited_for(tmp_path: Path) -> None:
    writer, learner = BackgroundWriter(pin_memory=False), Learner(1).train(1)
    learner.start(writer, tmp_path / "beside")
    assert writer.is_finished(wait=True)
    save_shards(tmp_path / "waited", learner.model, learner.optimizer, {"any": 1})
    one, two = (sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("beside", "waited"))
    assert one == two


def wait_for(writer: BackgroundWriter) -> bool:
    """Until the thread has ended, without asking for how."""
    assert writer._writing is not None
    return writer._writing.exception(30) is not None


@pytest.mark.parametrize("wait", [True, False])
def test_a_failure_is_raised_once_by_the_save_that_is_waited_for(
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
            writer.is_finished(wait)
    assert str(beside.value) == str(waited.value).replace("waited", "beside")
    assert "OSError: No space left on device" in str(beside.value)
    assert writer.is_finished(wait=False)
    learner.start(writer, tmp_path / "again")
    assert writer.is_finished(wait=True)
