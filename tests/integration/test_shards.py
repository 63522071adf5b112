"""Two real gloo ranks save what one loads and the reverse, and go on from it as if nothing had happened."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from two_processes import SERVER, free_port

from verl_rc.config.models import OptimConfig
from verl_rc.runtime.checkpoint import (
    BackgroundWriter,
    CheckpointError,
    collect_shards,
    load_full_state_dict,
    load_shards,
    resume_schedule,
    schedule_state,
    shards_problem,
    write_shards,
)
from verl_rc.runtime.checkpoint import shards as shards_module
from verl_rc.runtime.distributed.fsdp import gather_full_tensor, shard_model
from verl_rc.runtime.distributed.process_group import RankAddress, join_trainer_group, leave_trainer_group
from verl_rc.runtime.workers.sharded_model import build_optimizer, build_scheduler

VOCABULARY, WIDTH = 11, 5
"""Odd sizes: no tensor splits evenly over two ranks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.adapter = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x)) + self.adapter(x)


class SmallModel(nn.Module):
    """Tied embeddings, a buffer, and a value head of one row, of which the second rank holds nothing."""

    _no_split_modules = ("Block",)

    def __init__(self, width: int = WIDTH, value_head: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.value = nn.Linear(width, 1) if value_head else None
        self.register_buffer("scale", torch.rand(()) + 1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x) * self.scale
        return logits.logsumexp(-1).mean() + (self.value(x).square().mean() if self.value else 0)


class Trainer:
    """A sharded model, its optimizer and schedule, and batches drawn from the rank's random generator."""

    def __init__(self, mesh: Any, seed: int, frozen: bool = False, lr: float = 1e-2, **sizes: Any) -> None:
        torch.manual_seed(seed)
        self.model = SmallModel(**sizes)
        if frozen:
            self.model.requires_grad_(False)
            for block in self.model.blocks:
                block.adapter.requires_grad_(True)
        shard_model(self.model, mesh, torch.float32, reshard_after_forward=False)
        config = OptimConfig(lr=lr, weight_decay=0.1, lr_warmup_steps=4, lr_scheduler_type="cosine")
        self.optimizer = build_optimizer(self.model.parameters(), config)
        self.scheduler = build_scheduler(self.optimizer, config, 20)
        torch.manual_seed(1000 * seed + mesh.get_rank())

    def train(self, steps: int) -> "Trainer":
        for _ in range(steps):
            self.model(torch.randint(VOCABULARY, (4, 3))).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        return self

    def save(self, folder: Path, **options: Any) -> "Trainer":
        with torch.no_grad():
            self.model(torch.zeros(1, 1, dtype=torch.long))  # leaves parameters whole, as scoring does
        extra = {"scheduler": schedule_state(self.scheduler)}
        write_shards(folder, collect_shards(self.model, self.optimizer, extra, **options))
        return self

    def save_beside(self, writer: BackgroundWriter, folder: Path) -> None:
        writer.start(
            folder, collect_shards(self.model, self.optimizer, {"scheduler": schedule_state(self.scheduler)})
        )

    def load(self, folder: Path) -> "Trainer":
        resume_schedule(self.scheduler, load_shards(folder, self.model, self.optimizer)["scheduler"])
        return self

    def snapshot(self) -> dict[str, Tensor]:
        """Everything that the next step depends on, whole; a collective."""
        found = {name: gather_full_tensor(t).clone() for name, t in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}:{key}"] = gather_full_tensor(value).clone()
        found["lr"] = torch.tensor(
            [group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64
        )
        return found


def message_of(action: Any, *arguments: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*arguments)
    return str(caught.value)


def on_two_ranks(mesh: Any, folder: Path, found: dict[str, Any]) -> None:
    trainer = Trainer(mesh, seed=1).train(3).save(folder / "saved_by_2")
    found["2: saved"] = trainer.snapshot()
    found["2: straight on"] = trainer.train(3).snapshot()
    resumed = Trainer(mesh, seed=2).load(folder / "saved_by_2")
    found["2: loaded"] = resumed.snapshot()
    found["2: resumed"] = resumed.train(3).snapshot()
    found["2: rate changed"] = Trainer(mesh, seed=2, lr=2e-2).load(folder / "saved_by_2").snapshot()["lr"]

    trainer = Trainer(mesh, seed=3).save(folder / "unstepped")
    found["unstepped: state after saving"] = len(trainer.optimizer.state)
    found["unstepped: straight on"] = trainer.train(2).snapshot()
    found["unstepped: resumed"] = (
        Trainer(mesh, seed=4).train(1).load(folder / "unstepped").train(2).snapshot()
    )

    trainer = Trainer(mesh, seed=5, frozen=True).train(2).save(folder / "frozen", leave_out_frozen=True)
    found["frozen: straight on"] = trainer.train(2).snapshot()
    found["frozen: resumed"] = Trainer(mesh, seed=5, frozen=True).load(folder / "frozen").train(2).snapshot()
    found["frozen: trained whole"] = message_of(Trainer(mesh, seed=5).load, folder / "frozen")

    other = Trainer(mesh, seed=6, value_head=False)
    before = other.snapshot()
    found["other: additional"] = message_of(other.load, folder / "saved_by_2")
    found["other: untouched"] = all(
        torch.equal(before[name], value) for name, value in other.snapshot().items()
    )
    other.train(1).save(folder / "no_value_head")
    found["other: missing"] = message_of(Trainer(mesh, seed=6).load, folder / "no_value_head")
    found["other: wider"] = message_of(Trainer(mesh, seed=6, width=6).load, folder / "saved_by_2")
    found["other: no folder"] = message_of(other.load, folder / "nowhere")

    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == 1:
            patch.setattr(shards_module, "_random_file", lambda _: folder / "nowhere" / "x")
        found["one rank cannot write"] = message_of(other.save, folder / "unwritten")


def beside_the_training(mesh: Any, folder: Path, found: dict[str, Any]) -> None:
    """Ranks learn, in a group of their own, while other threads of theirs write; then the second of them
    cannot."""
    writer, trainer = BackgroundWriter(pin_memory=False), Trainer(mesh, seed=10).train(3)
    with waiting_disk():
        trainer.save_beside(writer, folder / "beside")
        trainer.train(3)
        found["beside: was being written"] = not writer.is_finished(wait=False)
    found["beside: straight on"] = trainer.snapshot()
    writer.is_finished(wait=True)
    found["beside: resumed"] = Trainer(mesh, seed=11).load(folder / "beside").train(3).snapshot()
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_rank() == 1:
            patch.setattr(FileSystemWriter, "write_data", lambda *_: (folder / "nowhere" / "x").read_text())
        trainer.save_beside(writer, folder / "unwritten beside")
        found["beside: one rank cannot write"] = message_of(writer.is_finished, True)
    trainer.train(1)


@contextmanager
def waiting_disk() -> Iterator[None]:
    """A disk that takes nothing until the end of the block."""
    ready, write = threading.Event(), FileSystemWriter.write_data
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", lambda *arguments: ready.wait() and write(*arguments))
        try:
            yield
        finally:
            ready.set()


def on_one_rank(mesh: Any, folder: Path, found: dict[str, Any]) -> None:
    trainer = Trainer(mesh, seed=7).load(folder / "saved_by_2")
    found["2 -> 1"] = trainer.snapshot()
    trainer.save(folder / "saved_by_1")
    found["1: straight on"] = trainer.train(3).snapshot()
    found["1: resumed"] = Trainer(mesh, seed=8).load(folder / "saved_by_1").train(3).snapshot()


def on_two_ranks_again(mesh: Any, folder: Path, found: dict[str, Any]) -> None:
    trainer = Trainer(mesh, seed=9)
    before = torch.get_rng_state()
    found["1 -> 2"] = trainer.load(folder / "saved_by_1").snapshot()
    found["1 -> 2: generator kept"] = torch.equal(before, torch.get_rng_state())


def run_rank(rank: int, folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    scenarios = (on_two_ranks, on_one_rank, on_two_ranks_again, beside_the_training)
    for scenario, world_size, port in zip(scenarios, (2, 1, 2, 2), ports, strict=True):
        if rank < world_size:
            mesh = join_trainer_group(
                RankAddress(rank, world_size, "127.0.0.1", port), torch.device("cpu"), 600
            )
            scenario(mesh, folder, found)
            leave_trainer_group()
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    ports = [free_port() for _ in range(4)]
    other = SERVER.Process(target=run_rank, args=(1, folder, ports))
    other.start()
    run_rank(0, folder, ports)  # here, where torch is loaded already
    other.join(timeout=600)
    assert other.exitcode == 0
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    """What each rank found, by the names in the scenarios."""
    return [torch.load(folder / f"found_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("2: saved", "2: loaded"),
        ("2: straight on", "2: resumed"),
        ("2: saved", "2 -> 1"),
        ("2: saved", "1 -> 2"),
        ("1: straight on", "1: resumed"),
        ("unstepped: straight on", "unstepped: resumed"),
        ("frozen: straight on", "frozen: resumed"),
        ("beside: straight on", "beside: resumed"),
    ],
)
def test_bit_for_bit(found: list[dict[str, Any]], one: str, other: str) -> None:
    for rank in found:
        if one in rank and other in rank:
            assert rank[one].keys() == rank[other].keys()
            different = [
                name for name, value in rank[one].items() if not torch.equal(value, rank[other][name])
            ]
            assert not different


def test_the_snapshots_hold_the_optimizer_and_have_moved(found: list[dict[str, Any]]) -> None:
    saved, later = found[0]["2: saved"], found[0]["2: straight on"]
    assert float(saved["embed.weight:step"]) == 3
    assert {"value.weight:exp_avg", "blocks.1.mix.bias:exp_avg_sq", "scale", "head.weight"} <= saved.keys()
    assert not torch.equal(saved["value.weight"], later["value.weight"])
    assert float(found[0]["unstepped: resumed"]["embed.weight:step"]) == 2


def test_saving_takes_no_step(found: list[dict[str, Any]]) -> None:
    assert [rank["unstepped: state after saving"] for rank in found] == [0, 0]


def test_a_changed_learning_rate_has_its_effect(found: list[dict[str, Any]]) -> None:
    assert found[0]["2: rate changed"] == 2 * found[0]["2: loaded"]["lr"]


def test_a_rank_that_was_not_saved_keeps_its_random_state(found: list[dict[str, Any]]) -> None:
    assert [rank["1 -> 2: generator kept"] for rank in found] == [False, True]


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("other: additional", "has in addition value.bias, value.weight;"),
        ("other: missing", "lacks value.bias, value.weight;"),
        ("other: wider", "has in another shape blocks.0.adapter.weight [5, 5] instead of [6, 6]"),
        (
            "frozen: trained whole",
            "lacks blocks.0.mix.bias, blocks.0.mix.weight, blocks.1.mix.bias, blocks.1.mix.weight",
        ),
        ("other: no folder", "shards.json is missing"),
        ("one rank cannot write", "nowhere does not exist"),
        ("beside: one rank cannot write", "1 failed, first rank 1 with FileNotFoundError"),
    ],
)
def test_every_rank_says_the_same(found: list[dict[str, Any]], case: str, said: str) -> None:
    assert said in found[0][case]
    assert found[0][case] == found[1][case]
    assert len(found[0][case].splitlines()) == 1
    assert len(found[0][case]) < 1000


def test_it_was_being_written_while_the_ranks_learned(found: list[dict[str, Any]]) -> None:
    assert [rank["beside: was being written"] for rank in found] == [True, True]


def test_a_refused_checkpoint_changes_nothing(found: list[dict[str, Any]]) -> None:
    assert [rank["other: untouched"] for rank in found] == [True, True]


def test_whole_tensors_without_a_group(folder: Path, found: list[dict[str, Any]]) -> None:
    whole = load_full_state_dict(folder / "saved_by_2")
    model = {name: value for name, value in found[0]["2: saved"].items() if ":" not in name and name != "lr"}
    assert whole.keys() == model.keys() - {"head.weight"}
    assert all(torch.equal(whole[name], model[name]) for name in whole)
    assert load_full_state_dict(folder / "frozen").keys() == {
        "blocks.0.adapter.weight",
        "blocks.1.adapter.weight",
        "scale",
    }


def test_shards_of_two_ranks_are_whole(folder: Path) -> None:
    assert shards_problem(folder / "saved_by_2") is None
    (shard := folder / "saved_by_2" / "__1_0.distcp").write_bytes(shard.read_bytes()[:-1])
    assert "__1_0.distcp must have" in str(shards_problem(folder / "saved_by_2"))
