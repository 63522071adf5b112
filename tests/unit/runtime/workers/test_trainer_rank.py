"""Roles that share a process compute what each computes alone, to the bit: the process group is one, random
numbers are not."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_checkpoints import whole
from small_models import make_train_batch, ragged, scored, small_run_config, write_small_model
from two_processes import free_port

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import CriticBatch, TrainBatch
from verl_rc.records.ragged import Ragged
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.trainer_rank import TrainerRank
from verl_rc.runtime.workers.updates import UpdateRequest

WORKERS = {
    "actor": "verl_rc.runtime.workers.policy_worker:PolicyWorker",
    "critic": "verl_rc.runtime.workers.critic_worker:CriticWorker",
    "reference": "verl_rc.runtime.workers.policy_worker:ReferenceWorker",
}
ROWS = [[0, 1], [2, 3]]


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose training draws random numbers."""
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.2}))
    return folder


@pytest.fixture(autouse=True)
def _leaving() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Alone:
    """A worker in a process of its own."""

    def __init__(self, workers: dict[str, str], **arguments: Any) -> None:
        ((role, worker),) = workers.items()
        torch.manual_seed(arguments["config"].trainer.seed)
        module, name = worker.split(":")
        self._workers = {role: getattr(import_module(module), name)(**arguments)}

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        return getattr(self._workers[role], method)(*arguments)

    def close(self) -> None:
        dist.destroy_process_group()


def start(folder: Path, *roles: str, more: Sequence[str] = ()) -> TrainerRank | Alone:
    learns = (
        "critic.enable=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.optim.lr=0.01",
    )
    precision = [f"{role}.fsdp_config.dtype=float32" for role in ("critic", "actor_rollout_ref.ref")]
    config = small_run_config(folder, *learns, *precision, *more)
    address = RankAddress(0, 1, "127.0.0.1", free_port())
    kind = TrainerRank if len(roles) > 1 else Alone
    return kind({role: WORKERS[role] for role in roles}, config=config, address=address, total_steps=10)


def train(rank: TrainerRank | Alone, role: str, batch: TrainBatch) -> None:
    counted = batch.response_mask.sum(-1)
    share = MiniBatch(ROWS, int(counted.sum()), len(counted), int(batch.loss_mask.sum()))
    if role == "actor":
        request = UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0)
        rank.call("actor", "update", ragged(batch), [share], request)
    if role == "critic":
        values = torch.zeros_like(batch.advantages)
        returns = torch.where(batch.response_mask, 1.0, 0.0)
        rank.call(
            "critic",
            "update",
            ragged(CriticBatch(batch.tokens, batch.response_mask, values, returns, batch_size=[4])),
            [share],
        )


def trained(folder: Path, *roles: str) -> dict[str, torch.Tensor]:
    """What every role scores and holds after two steps, in which the roles take turns."""
    rank = start(folder, *roles)
    scoring = {"actor": "compute_log_probs", "critic": "compute_values", "reference": "compute_log_probs"}
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        batch = make_train_batch([7, 2, 5, 6], seed=step)
        batch.reference_log_probs = batch.old_log_probs
        for role in roles:
            found[f"{role} {step}"], *_ = scored(partial(rank.call, role, scoring[role]), batch.tokens, ROWS)
        for role in reversed(roles):
            train(rank, role, batch)
    for role in roles:
        module = rank._workers[role].model.module
        found[f"{role}'s weights"] = torch.cat(
            [whole(parameter).flatten() for parameter in module.parameters()]
        )
    rank.close()
    return found


def test_a_role_does_not_notice_the_others(with_dropout: Path) -> None:
    together = trained(with_dropout, *WORKERS)
    alone = {name: value for role in WORKERS for name, value in trained(with_dropout, role).items()}
    assert len(alone) == 9
    assert {name for name, value in alone.items() if not torch.equal(value, together[name])} == set()
    assert not torch.equal(together["actor's weights"], together["reference's weights"])


@pytest.mark.parametrize("told", [(), ("actor_rollout_ref.model.enable_gradient_checkpointing=True",)])
def test_a_cpu_recomputes_activations_only_where_it_is_told_to(
    model_folder: Path, told: Sequence[str]
) -> None:
    rank = start(model_folder, "actor", "critic", more=told)
    modules = [rank._workers[role].model.module for role in ("actor", "critic")]
    assert [module.is_gradient_checkpointing for module in modules] == [bool(told)] * 2
    rank.close()


def test_the_seed_of_the_run_decides_how_adapters_start(model_folder: Path) -> None:
    def adapters(seed: int) -> torch.Tensor:
        torch.manual_seed(1234)  # a process may have drawn any number before
        rank = start(
            model_folder,
            "actor",
            "critic",
            more=("actor_rollout_ref.model.lora_rank=2", f"trainer.seed={seed}"),
        )
        named = rank._workers["actor"].model.module.named_parameters()
        found = torch.cat([whole(parameter).flatten() for name, parameter in named if ".lora_A." in name])
        rank.close()
        return found

    assert torch.equal(adapters(1), adapters(1))
    assert not torch.equal(adapters(1), adapters(2))


def test_a_role_that_is_resumed_goes_on_with_its_own_random_numbers(
    with_dropout: Path, tmp_path: Path
) -> None:
    """A checkpoint holds the generator of each; the critic's is loaded after the actor's."""
    batch = make_train_batch([7, 2, 5, 6])
    batch.reference_log_probs = batch.old_log_probs
    weights = []
    rank = start(with_dropout, *WORKERS)
    train(rank, "actor", batch)  # the generators differ now
    for role in ("actor", "critic"):
        rank.call(role, "save", tmp_path / role)
    for resumes in (False, True):
        if resumes:
            rank.close()
            rank = start(with_dropout, *WORKERS)
            for role in ("actor", "critic"):
                rank.call(role, "load", tmp_path / role)
        train(rank, "actor", batch)
        module = rank._workers["actor"].model.module
        weights.append(torch.cat([whole(parameter).flatten() for parameter in module.parameters()]))
    assert torch.equal(*weights)


def test_models_of_one_mesh_share_the_process_group(model_folder: Path) -> None:
    start(model_folder, *WORKERS)
    assert dist.get_world_size() == 1
    assert len(dist.distributed_c10d._world.pg_map) == 1


def test_a_rank_pads_each_micro_batch_once_and_nothing_else(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_train_batch([7, 2, 5, 6])
    batch.reference_log_probs = batch.old_log_probs
    padded, pad = list[Sequence[int]](), Ragged.padded

    def noted(rows_of_share: Ragged[TrainBatch], rows: Sequence[int]) -> TrainBatch:
        padded.append(rows)
        return pad(rows_of_share, rows)

    monkeypatch.setattr(Ragged, "padded", noted)
    rank = start(model_folder, *WORKERS)
    for role, method in (("actor", "compute_log_probs"), ("critic", "compute_values")):
        rank.call(role, method, ragged(batch.tokens), ROWS)
        assert padded == ROWS
        train(rank, role, batch)
        assert padded == [*ROWS, *ROWS]
        padded.clear()
    rank.close()


def test_a_refreshed_reference_is_the_actor_then_stays_and_is_restored(
    with_dropout: Path, tmp_path: Path
) -> None:
    rank = start(with_dropout, "actor", "reference")
    batch = make_train_batch([7, 2, 5, 6])
    batch.reference_log_probs = batch.old_log_probs

    def scores(rank: TrainerRank | Alone, role: str) -> torch.Tensor:
        found, *_ = scored(partial(rank.call, role, "compute_log_probs"), batch.tokens, ROWS)
        return found

    initial = scores(rank, "reference")
    train(rank, "actor", batch)
    assert torch.equal(scores(rank, "reference"), initial)
    assert isinstance(rank, TrainerRank)
    rank.refresh_reference()
    refreshed = scores(rank, "actor")
    assert not torch.equal(refreshed, initial)
    assert torch.equal(scores(rank, "reference"), refreshed)
    train(rank, "actor", batch)
    assert torch.equal(scores(rank, "reference"), refreshed)
    rank.call("reference", "save", tmp_path / "reference")
    assert rank.call("reference", "has_saved", False)
    rank.close()
    again = start(with_dropout, "actor", "reference")
    assert torch.equal(scores(again, "reference"), initial)
    again.call("reference", "load", tmp_path / "reference")
    assert torch.equal(scores(again, "reference"), refreshed)
    again.close()
