"""Learning in float16 on two gloo ranks: an infinity in one rank's shard is seen by both."""

import math
from pathlib import Path
from typing import Any

import torch
from small_models import make_train_batch, ragged, small_run_config, write_small_model
from two_processes import free_port, run_two_ranks


def run_rank(rank: int, model: Path, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    from verl_rc.algorithm.ppo.in_actor import Corrected
    from verl_rc.algorithm.ppo.mini_batches import MiniBatch
    from verl_rc.runtime.distributed.process_group import RankAddress
    from verl_rc.runtime.workers import float16
    from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
    from verl_rc.runtime.workers.policy_worker import PolicyWorker

    float16.float16_product_seconds = lambda: (1e-3, 1e-3)
    config = small_run_config(
        model, "trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.dtype=fp16"
    )
    worker = PolicyWorker(config, RankAddress(rank, 2, "127.0.0.1", port), total_steps=10)
    batch = make_train_batch([7, 2, 5, 1])
    counted = batch.response_mask.sum(-1)
    share = MiniBatch([[2 * rank, 2 * rank + 1]], int(counted.sum()), 4, int(counted.sum()))
    found: dict[str, Any] = {"steps": []}
    for broken_rank in (1, None, 0, None):
        worker.accumulate(ragged(batch), share, ObjectiveTotals("actor"), Corrected())
        if rank == broken_rank:
            shard: Any = next(worker.model.module.parameters()).grad
            shard.to_local()[0, 0] = math.inf
        step = worker.model.step()
        found["steps"].append((step.outcome, step.loss_scale))
    found["state"] = worker.model._loss_scale.state_dict()
    found["updates"] = max(int(state["step"]) for state in worker.model.optimizer.state.values())
    torch.save(found, folder / f"found_{rank}.pt")
    worker.close()


def test_ranks_skip_together_and_keep_one_scale(tmp_path: Path) -> None:
    run_two_ranks(
        run_rank, write_small_model(tmp_path / "model", tie_word_embeddings=False), free_port(), tmp_path
    )
    first, second = (torch.load(tmp_path / f"found_{rank}.pt") for rank in range(2))
    assert first == second
    assert first["steps"] == [
        ("overflow", 65536.0),
        ("trained", 32768.0),
        ("overflow", 32768.0),
        ("trained", 16384.0),
    ]
    assert first["state"]["_growth_tracker"] == 1
    assert first["updates"] == 2
