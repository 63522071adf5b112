"""Weights that groups of ranks share, each group a copy: the numbers of one group of all ranks, on four gloo
ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from small_checkpoints import whole
from small_models import make_train_batch, ragged, scored, small_run_config, write_small_model
from two_processes import free_port, run_ranks

RANKS = 4
SIZES = (-1, 2, 1)
"""All ranks together; two groups of two; a whole copy on every rank."""
LENGTHS = [7, 2, 5, 3, 1, 6, 4, 7]
SIZE = "actor_rollout_ref.actor.fsdp_config.fsdp_size"
OFTEN = "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation=False"
CASES: dict[str, tuple[str, ...]] = {
    "all weights": (),
    "reduced after every micro-batch": (OFTEN,),
    "adapters": ("actor_rollout_ref.model.lora_rank=2",),
}


def updated(
    rank: int,
    model: Path,
    port: int,
    size: int,
    options: tuple[str, ...],
    saved: Path | None = None,
    loaded: Path | None = None,
) -> dict[str, Any]:
    """Numbers of one rank after an update of two micro-batches, some of them empty, from the checkpoint
    ``loaded``; it is ``saved``."""
    options, groups_of = (*options, f"{SIZE}={size}"), RANKS if size == -1 else size
    from verl_rc.algorithm.ppo.corrector import corrector_of
    from verl_rc.algorithm.ppo.mini_batches import MiniBatch
    from verl_rc.config.rollout_correction import RolloutCorrectionConfig
    from verl_rc.runtime.distributed.process_group import RankAddress
    from verl_rc.runtime.workers.policy_worker import PolicyWorker
    from verl_rc.runtime.workers.updates import UpdateRequest

    config = small_run_config(
        model, "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.optim.lr=0.01", *options
    )
    torch.manual_seed(3 + rank // groups_of)  # groups draw different adapters, and take those of the first
    worker = PolicyWorker(config, RankAddress(rank, RANKS, "127.0.0.1", port), total_steps=10)
    if loaded is not None:
        worker.load(loaded)
    batch = make_train_batch(LENGTHS, (2,))
    counted = batch.response_mask.sum(-1)
    micro_batches = [[[0], [1, 2]], [[3], [4]], [[5], []], [[], [6, 7]]][rank]
    share = MiniBatch(micro_batches, int(counted.sum()), len(LENGTHS), int(batch.loss_mask.sum()))
    request = UpdateRequest(corrector_of(RolloutCorrectionConfig()), 0)
    report = worker.update(ragged(batch), [share], request)
    module, weights = worker.model.module, worker._sender._weights
    # A key bias shifts all scores of a query alike: its gradient is 0 but for rounding, which Adam's first
    # step blows up.
    moved = [parameter for name, parameter in module.named_parameters() if not name.endswith("k_proj.bias")]
    names = [name for name in weights.shapes() if not name.endswith("k_proj.bias")]
    found = {
        "norms": torch.tensor(
            [metric.value for metric in report.metrics if metric.name == "actor/grad_norm"]
        ),
        "weights": flat(whole(parameter) for parameter in moved),
        "sent": flat(weights.gather(names, torch.float32)),
        "log-probs": scored(worker.compute_log_probs, batch.tokens, [[0, 1, 2, 3], [4, 5, 6, 7]])[0],
        "here": sum(parameter.to_local().numel() for parameter in moved),  # type: ignore[attr-defined]
    }
    if saved is not None:
        worker.save(saved)
    worker.close()
    return found


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double()


def run_rank(rank: int, model: Path, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for name, options in CASES.items():
        for size in SIZES:
            saved = None if options else folder / str(size)
            found[name, size] = updated(rank, model, ports.pop(), size, options, saved)
    for size, other in ((-1, 2), (2, -1), (2, 1)):
        found["loaded", size, other] = updated(rank, model, ports.pop(), size, (), loaded=folder / str(other))
    torch.save(found, folder / f"found_{rank}.pt")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, dict[str, Any]]]:
    """What every rank found."""
    model, folder = write_small_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("found")
    run_ranks(RANKS, run_rank, model, [free_port() for _ in range(len(CASES) * len(SIZES) + 3)], folder)
    return [torch.load(folder / f"found_{rank}.pt") for rank in range(RANKS)]


def assert_close(one: torch.Tensor, two: torch.Tensor) -> None:
    """To some 30 roundings of the length of the vector: CPUs add in other orders."""
    assert float(one.norm()) > 0
    assert float((two - one).norm() / one.norm()) <= 4e-6


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("case", CASES)
def test_groups_give_the_numbers_of_all_ranks_together(ranks: Any, case: str, size: int) -> None:
    for of_rank in ranks:
        for name in ("norms", "weights", "sent", "log-probs"):
            assert_close(ranks[0][case, -1][name], of_rank[case, size][name])


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_holds_its_share_of_one_copy(ranks: Any, size: int) -> None:
    everything = ranks[0]["all weights", -1]["weights"].numel()
    held = [of_rank["all weights", size]["here"] for of_rank in ranks]
    group = RANKS if size == -1 else size
    assert [sum(held[first : first + group]) for first in range(0, RANKS, group)] == [everything] * (
        RANKS // group
    )


@pytest.mark.parametrize(("size", "other"), [(-1, 2), (2, -1), (2, 1)])
def test_a_checkpoint_of_other_groups_is_loaded(ranks: Any, size: int, other: int) -> None:
    """The second update begins with the weights and moments of the first."""
    expected = ranks[0]["loaded", -1, 2]
    for of_rank in ranks:
        for name in ("norms", "weights", "sent"):
            assert_close(expected[name], of_rank["loaded", size, other][name])
    first = ranks[0]["all weights", -1]["weights"]
    assert float((expected["weights"] - first).norm()) > 0.01
