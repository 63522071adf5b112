"""Every policy loss through the actor's own update code: the same gradient however it is cut, and another one
than PPO's."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from small_models import make_train_batch, ragged, scored, small_run_config
from two_processes import free_port

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import Corrected
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.algorithms import LOSS_MODES
from verl_rc.config.models import PolicyLossConfig
from verl_rc.records.batches import TrainBatch
from verl_rc.runtime.distributed.process_group import RankAddress
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker
from verl_rc.runtime.workers.updates import UpdateRequest

LENGTHS = [7, 2, 5, 0, 1, 6]
REJECTED = (2,)
ROWS = list(range(len(LENGTHS)))
OF_ONES_OWN = """
def log_prob_loss(inputs):
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {"actor/ppo_kl": inputs.mean_over_tokens(inputs.log_ratio)}
"""  # noqa: E501
NUMBERS = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}


@pytest.fixture(scope="module")
def worker(model_folder: Path) -> Iterator[PolicyWorker]:
    config = small_run_config(
        model_folder,
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.actor.optim.lr=0.01",
    )
    worker = PolicyWorker(config, RankAddress(0, 1, "127.0.0.1", free_port()), total_steps=10)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def batch(worker: PolicyWorker) -> TrainBatch:
    """Old log-probs near the current ones, so that clipping is partial."""
    batch = make_train_batch(LENGTHS, REJECTED)
    current = scored(worker.compute_log_probs, batch.tokens, [ROWS])[0]
    noise = 0.2 * torch.randn(current.shape, generator=torch.Generator().manual_seed(7))
    batch.old_log_probs = torch.where(batch.response_mask, current + noise, 0.0)
    return batch


def choose(worker: PolicyWorker, loss_mode: str) -> None:
    numbers = {**NUMBERS, **({"dro_beta": 0.1} if loss_mode == "dro" else {})}
    policy_loss = PolicyLossConfig.model_validate({"loss_mode": loss_mode, **numbers})
    worker._actor = worker._actor.model_copy(update={"policy_loss": policy_loss})


def share_of(batch: TrainBatch, micro_batches: list[list[int]]) -> MiniBatch:
    counted = batch.response_mask.sum(-1)
    return MiniBatch(micro_batches, int(counted.sum()), int((counted > 0).sum()), int(batch.loss_mask.sum()))


def gradient(worker: PolicyWorker, batch: TrainBatch, micro_batches: list[list[int]]) -> torch.Tensor:
    worker.accumulate(ragged(batch), share_of(batch, micro_batches), ObjectiveTotals("actor"), Corrected())
    flat = torch.cat([p.grad.full_tensor().flatten() for p in worker.model.module.parameters()]).double()  # type: ignore[union-attr]
    worker.model.optimizer.zero_grad()
    return flat


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("loss_mode", [*LOSS_MODES, "of_ones_own:log_prob_loss"])
def test_cutting_changes_no_gradient_and_no_two_losses_are_one(
    worker: PolicyWorker, batch: TrainBatch, loss_mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_ones_own.py").write_text(OF_ONES_OWN)
    monkeypatch.syspath_prepend(tmp_path)
    choose(worker, "vanilla")
    vanilla = gradient(worker, batch, [ROWS])
    choose(worker, loss_mode)
    whole = gradient(worker, batch, [ROWS])
    assert bool(whole.isfinite().all())
    assert relative_difference(gradient(worker, batch, [[5, 1], [0], [4, 2, 3], []]), whole) <= 1e-5
    if loss_mode != "vanilla":
        assert relative_difference(whole, vanilla) > 1e-3


def test_a_pass_for_statistics_is_timed(worker: PolicyWorker, batch: TrainBatch) -> None:
    for loss_mode, is_timed in (("kl_cov", True), ("vanilla", False)):
        choose(worker, loss_mode)
        request = UpdateRequest(corrector_of(worker._correction), 0)
        report = worker.update(ragged(batch), [share_of(batch, [ROWS])], request)
        seconds = [
            metric.value for metric in report.metrics if metric.name == "timing_s/correction_statistics"
        ]
        assert (len(seconds), sum(seconds) > 0) == (int(is_timed), is_timed)


def test_the_optimal_baseline_gets_the_sums_of_squared_probabilities(
    worker: PolicyWorker, batch: TrainBatch
) -> None:
    """By Jensen's inequality they are at least exp(-entropy); and at most 1."""
    log_probs, entropies, squares, _ = scored(worker.compute_log_probs, batch.tokens, [[0, 1, 2], [3, 4, 5]])
    assert log_probs.shape == squares.shape
    assert bool((squares >= (-entropies).exp() - 1e-6)[batch.response_mask].all())
    assert bool((squares <= 1)[batch.response_mask].all())
    assert not squares[~batch.response_mask].any()
