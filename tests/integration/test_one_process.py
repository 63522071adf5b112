"""Two ranks: roles with other meshes in one process compute what each computes alone, to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import whole
from small_models import make_train_batch, ragged, scored, small_run_config, write_small_model
from two_processes import free_port, run_ranks

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.records.batches import CriticBatch
from verl_rc.runtime.checkpoint import load_full_state_dict
from verl_rc.runtime.distributed.process_group import RankAddress, leave_trainer_group
from verl_rc.runtime.workers.critic_worker import CriticWorker
from verl_rc.runtime.workers.policy_worker import PolicyWorker, ReferenceWorker
from verl_rc.runtime.workers.trainer_rank import TrainerRank
from verl_rc.runtime.workers.updates import UpdateRequest

KINDS = {"actor": PolicyWorker, "critic": CriticWorker, "reference": ReferenceWorker}
CASES = (("actor",), ("critic",), tuple(KINDS))
OWN_ROWS = [[[0, 1], [2]], [[3], [4, 5]]]
"""Micro-batches of each rank; the actor's ranks share all of them."""
SHARED_ROWS = [[0, 1, 2], [3, 4, 5]]


def run_rank(number: int, folder: Path, ports: list[int]) -> None:
    """A rank of the actor alone, of the critic alone, or of all roles, for each number of these pairs of
    processes."""
    torch.set_num_threads(1)
    rank, roles = number % 2, CASES[number // 2]
    meshes = (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size=1",
        "critic.fsdp_config.fsdp_size=1",
        "critic.fsdp_config.ulysses_sequence_parallel_size=1",
    )
    learns = (
        "critic.enable=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.optim.lr=0.01",
    )
    saving = ("actor_rollout_ref.actor.checkpoint.async_save=True",)
    config = small_run_config(folder, "trainer.n_gpus_per_node=2", *meshes, *learns, *saving)
    arguments = {
        "config": config,
        "address": RankAddress(rank, 2, "127.0.0.1", ports[number // 2]),
        "total_steps": 10,
    }
    if len(roles) == 1:
        workers = {role: KINDS[role](**arguments) for role in roles}
    else:
        names = {role: f"{KINDS[role].__module__}:{KINDS[role].__name__}" for role in roles}
        workers = TrainerRank(names, **arguments)._workers
    torch.save(trained(rank, workers, folder / f"{len(roles)} roles"), folder / f"found_{number}.pt")
    leave_trainer_group()


def trained(rank: int, workers: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the roles score and hold after two steps, saved after the first and in the background."""
    found: dict[str, Any] = {}
    for step in range(2):
        batch = make_train_batch([7, 2, 5, 6, 1, 4], seed=step)
        batch.reference_log_probs = batch.old_log_probs
        counts = (int(batch.response_mask.sum()), 6, int(batch.loss_mask.sum()))
        values = CriticBatch(
            batch.tokens,
            batch.response_mask,
            torch.zeros_like(batch.advantages),
            1.0 * batch.response_mask,
            batch_size=[6],
        )
        for role, worker in workers.items():
            score = worker.compute_values if role == "critic" else worker.compute_log_probs
            found[f"{role} {step}"] = scored(
                score, batch.tokens, SHARED_ROWS if role == "actor" else OWN_ROWS[rank]
            )[0]
        if "critic" in workers:
            workers["critic"].update(ragged(values), [MiniBatch(OWN_ROWS[rank], *counts)])
        if "actor" in workers:
            request = UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0)
            workers["actor"].update(ragged(batch), [MiniBatch(SHARED_ROWS, *counts)], request)
        if step == 0:
            for role in [
                role for role in workers if role != "reference"
            ]:  # collective: in the same order on both ranks
                workers[role].save(folder / role)
    for role, worker in workers.items():
        found[f"{role}'s weights"] = torch.cat(
            [whole(each).flatten() for each in worker.model.module.parameters()]
        )
        if role != "reference":
            assert worker.has_saved(True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    run_ranks(6, run_rank, folder, [free_port() for _ in CASES])
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_scores_and_weights_are_those_of_a_role_alone(folder: Path, rank: int) -> None:
    actor, critic, together = (torch.load(folder / f"found_{2 * case + rank}.pt") for case in range(3))
    alone = actor | critic
    assert len(alone) == 6
    assert {name for name, value in alone.items() if not torch.equal(value, together[name])} == set()


def test_what_they_write_at_the_same_time_is_the_same(folder: Path) -> None:
    """Two threads of a process write checkpoints, each in a group of its own."""
    for role in ("actor", "critic"):
        alone, together = (load_full_state_dict(folder / where / role) for where in ("1 roles", "3 roles"))
        assert alone.keys() == together.keys()
        assert all(torch.equal(alone[name], together[name]) for name in alone)
