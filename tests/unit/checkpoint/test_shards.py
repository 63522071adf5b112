"""One process without a group and plain tensors; sharded models on two ranks are in tests/integration/test_shards.py."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.optim import AdamW

from verl_rc.checkpoint.shard_folder import shards_problem
from verl_rc.checkpoint.shards import BackgroundWriter, collect_shards, is_frozen, load_shards, named_tensors, save_shards
from verl_rc.checkpoint.store import CheckpointError


def build(seed: int, width: int = 3, layers: int = 2) -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    return model, AdamW(model.parameters(), lr=0.1)


def train(model: nn.Sequential, optimizer: AdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.rand(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


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


def test_without_optimizer(tmp_path: Path) -> None:
    model, optimizer = build(1)
    save_shards(tmp_path / "reference", model, None, {})
    save_shards(tmp_path / "actor", model, optimizer, {})
    for name in ("reference", "actor"):
        other, _ = build(2)
        load_shards(tmp_path / name, other, None)
        assert torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(CheckpointError, match="it was saved without an optimizer"):
        load_shards(tmp_path / "reference", model, optimizer)


def test_frozen_parameters_stay_those_of_the_base_model(tmp_path: Path) -> None:
    model, _ = build(1)
    model[0].requires_grad_(False)
    save_shards(tmp_path / "lora", model, None, {}, leave_out_frozen=True)
    other, _ = build(2)
    other[0].requires_grad_(False)
    base = other[0].weight.clone()
    load_shards(tmp_path / "lora", other, None)
    assert torch.equal(other[0].weight, base)
    assert torch.equal(other[1].weight, model[1].weight)
    with pytest.raises(CheckpointError, match=r"it lacks 0\.bias, 0\.weight"):
        load_shards(tmp_path / "lora", build(3)[0], None)


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
    (tmp_path / "actor" / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"reading the shards in .* first rank 0 with") as caught:
        load_shards(tmp_path / "actor", model, optimizer)
    assert len(str(caught.value).splitlines()) == 1


def test_a_full_disk_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(FileSystemWriter, "write_data", full)
    with pytest.raises(CheckpointError, match=r"writing the shards in .*OSError: No space left") as caught:
        save_shards(tmp_path / "actor", build(1)[0], None, {})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("beside", [False, True])
def test_a_disk_that_takes_a_part_is_one_error(tmp_path: Path, beside: bool) -> None:
    model, writer, limits = build(1, layers=50)[0], BackgroundWriter(pin_memory=False), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # largest file, bytes; the random state has 5,000
    try:
        if beside:
            writer.start(tmp_path / "actor", collect_shards(model, None, {}))
        with pytest.raises(CheckpointError, match=r"writing the shards in .*OSError: \[Errno 27\] File too large") as caught:
            writer.has_ended(wait=True) if beside else save_shards(tmp_path / "actor", model, None, {})
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
        "0.weight", "2.weight", "2.bias", "2.running_mean", "2.running_var", "2.num_batches_tracked"
    }  # fmt: skip


def test_only_parameters_are_frozen() -> None:
    assert is_frozen(nn.Parameter(torch.ones(1), requires_grad=False))
    assert not is_frozen(nn.Parameter(torch.ones(1)))
    assert not is_frozen(torch.ones(1))
