"""Two real gloo ranks give the gradient of one, with uneven token counts and a rank of which everything is rejected."""

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import make_train_batch, small_run_config, write_small_model

LENGTHS = [7, 2, 5, 0, 1, 6, 7, 3]
REJECTED = (4, 5, 6, 7)
"""All rows of the second rank."""
SPLITS: dict[int, list[list[list[int]]]] = {
    1: [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    2: [[[0, 1], [2, 3]], [[4, 5, 6, 7], []]],
}


def gradients_of_rank(folder: Path, rank: int, world_size: int, port: int, results: Any) -> None:
    """Gradients under every aggregation mode, whole, from the first rank."""
    from verl_rc.distributed.mesh import RankAddress
    from verl_rc.losses import AGGREGATION_MODES
    from verl_rc.ppo.mini_batches import MiniBatchShare
    from verl_rc.workers.accumulate import ObjectiveTotals
    from verl_rc.workers.policy_worker import PolicyWorker

    torch.set_num_threads(1)
    config = small_run_config(folder, "actor_rollout_ref.actor.entropy_coeff=0.05")
    worker = PolicyWorker(config, RankAddress(rank, world_size, "127.0.0.1", port), total_steps=10)
    batch = make_train_batch(LENGTHS, REJECTED)
    counted = batch.response_mask.sum(-1)
    share = MiniBatchShare(
        SPLITS[world_size][rank], int(counted.sum()), int((counted > 0).sum()), int(batch.loss_mask.sum())
    )
    found = {}
    for mode in AGGREGATION_MODES:
        worker._actor = worker._actor.model_copy(update={"loss_agg_mode": mode})
        worker.accumulate_gradients(batch, share, ObjectiveTotals(num_updates=1))
        found[mode] = torch.cat([p.grad.full_tensor().flatten() for p in worker.model.parameters()]).double()  # type: ignore[union-attr]
        worker.optimizer.zero_grad()
    if rank == 0:
        results.put({mode: gradient.numpy() for mode, gradient in found.items()})
    worker.close()


def gradients(folder: Path, world_size: int) -> dict[str, torch.Tensor]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = context.Queue()
    ranks = [
        context.Process(target=gradients_of_rank, args=(folder, rank, world_size, port, results)) for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    found = results.get(timeout=120)
    for process in ranks:
        process.join(timeout=30)
        assert process.exitcode == 0
    return {mode: torch.from_numpy(gradient) for mode, gradient in found.items()}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    folder = write_small_model(tmp_path_factory.mktemp("model"))
    return gradients(folder, 1), gradients(folder, 2)


@pytest.mark.parametrize(
    "mode", ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"]
)
def test_two_ranks_equal_one(both: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]], mode: str) -> None:
    one, two = both[0][mode], both[1][mode]
    assert one.norm() > 0
    assert float((two - one).norm() / one.norm()) <= 1e-5
