"""Gradients that are reduced after every micro-batch equal those that each rank adds up whole, and take less
memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_runs import ON_8_GPUS, Given, config_of
from small_checkpoints import whole
from small_models import make_train_batch, ragged, small_run_config, write_small_model
from small_runs import HELPERS, ROOT
from two_processes import free_port, run_two_ranks

from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.plan.memory import ModelShape, estimate_roles
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker

LENGTHS = [7, 2, 5, 3, 1, 6]
ACTOR = "actor_rollout_ref.actor"
KEY = f"{ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation"
SHARED = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
CASES: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "adapters": ("actor_rollout_ref.model.lora_rank=2",),
    "checkpointing": ("actor_rollout_ref.model.enable_gradient_checkpointing=True",),
}


def gradients(
    rank: int, folder: Path, port: int, once: bool, overrides: tuple[str, ...]
) -> dict[str, torch.Tensor]:
    """Of three micro-batches a rank, one of them empty on the second rank."""
    config = small_run_config(folder, "trainer.n_gpus_per_node=2", f"{KEY}={once}", *overrides)
    torch.manual_seed(3)
    worker = PolicyWorker(config, RankAddress(rank, 2, "127.0.0.1", port), total_steps=10)
    batch = make_train_batch(LENGTHS, (2,))
    micro_batches = [[[0], [1, 2], [3]], [[4], [5], []]][rank]
    counted = batch.response_mask.sum(-1)
    share = MiniBatch(micro_batches, int(counted.sum()), len(LENGTHS), int(batch.loss_mask.sum()))
    worker.model.module.train()
    worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), Corrected())
    found = {name: whole(p.grad) for name, p in worker.model.module.named_parameters() if p.grad is not None}
    worker.close()
    return found


def run_rank(rank: int, folder: Path, ports: list[int]) -> None:
    torch.set_num_threads(1)
    found = {}
    for (name, overrides), pair in zip(CASES.items(), zip(ports[::2], ports[1::2], strict=True), strict=True):
        for port, once in zip(pair, (True, False), strict=True):
            found[name, once] = gradients(rank, folder, port, once, overrides)
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    ports = [free_port() for _ in range(2 * len(CASES))]
    run_two_ranks(run_rank, folder, ports)
    gradients: dict[tuple[str, bool], dict[str, torch.Tensor]] = torch.load(folder / "found_0.pt")
    return gradients


@pytest.mark.parametrize("case", CASES)
def test_both_ways_give_the_same_gradients(found: Any, case: str) -> None:
    once, often = found[case, True], found[case, False]
    assert set(once) == set(often) != set()
    assert sum(float(gradient.norm()) for gradient in once.values()) > 0.01
    for name, gradient in once.items():
        torch.testing.assert_close(often[name], gradient, rtol=1e-5, atol=1e-6 * float(gradient.abs().max()))


UPDATES = ((16_384, 1), (32_768, 4))
"""Tokens of a micro-batch, and ranks that share them."""


@pytest.fixture(scope="module")
def updates() -> dict[tuple[int, int], Any]:
    """What each of ``UPDATES`` holds on one rank: four layers of a 7B model on eight ranks, by the project's
    own code on tensors without memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), HELPERS])}
    numbers = ["4", *(str(number) for pair in UPDATES for number in pair)]
    command = [sys.executable, str(ROOT / "tests" / "helpers" / "counting" / "fake_update.py"), *numbers]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    lines = answer.stdout.splitlines()[-len(UPDATES) :]
    return {pair: json.loads(line) for pair, line in zip(UPDATES, lines, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "sharing"), UPDATES)
def test_memory_between_micro_batches_and_at_the_peak_is_as_estimated(
    updates: dict[tuple[int, int], Any], tokens: int, sharing: int
) -> None:
    measured = updates[tokens, sharing]
    layer = 2 * 3584 * 3584 + 3584 + 2 * (512 * 3584 + 512) + 3 * 3584 * 18_944 + 2 * 3584
    embeddings = 2 * 152_064 * 3584
    shape = ModelShape(embeddings + 4 * layer + 3584, embeddings, 0, 4, 3584, 152_064, 32_768)
    for once, expected in ((True, 4 * shape.parameters), (False, 4 * shape.parameters // 8)):
        found = measured[str(once)]
        assert expected <= found["between"] - found["at rest"] <= 1.02 * expected
        given: Given = {KEY: once, SHARED: sharing, f"{ACTOR}.ppo_max_token_len_per_gpu": tokens // sharing}
        config = config_of({**ON_8_GPUS, **given})
        actor = next(
            role for role in estimate_roles(config, {"unused": shape}, 80 << 30) if role.role == "actor"
        )
        assert 0.9 * found["peak"] <= actor.model - actor.optimizer <= 1.1 * found["peak"]
