"""The loss that is differentiated, against a float64 loop."""

import math
from pathlib import Path

import pytest
import torch
from small_models import make_train_batch, small_run_config

from verl_rc.data.batches import TrainBatch
from verl_rc.losses import Aggregation
from verl_rc.ppo.objective import policy_objective

LENGTHS, REJECTED = [7, 2, 5, 0, 1, 6], (2,)


def objective_of(batch: TrainBatch, log_probs: torch.Tensor, entropys: torch.Tensor, denominator: str) -> torch.Tensor:
    actor = small_run_config(Path("unused"), "actor_rollout_ref.actor.entropy_coeff=0.1").actor_rollout_ref.actor
    counted = batch.loss_mask if denominator == "kept" else batch.response_mask
    totals = Aggregation("token-mean", num_tokens=int(counted.sum()), num_sequences=int(counted.any(-1).sum()))
    return policy_objective(log_probs, entropys, batch, actor, totals, denominator).loss


def expected_loss(batch: TrainBatch, log_probs: torch.Tensor, entropys: torch.Tensor, denominator: str) -> float:
    """PPO clip (0.2, dual clip 3) times weight, less 0.1 x entropy, over kept tokens, by the tokens that count."""
    total = 0.0
    weights = batch.rollout_is_weights
    assert weights is not None
    for row, column in batch.loss_mask.nonzero().tolist():
        advantage = float(batch.advantages[row, column])
        ratio = math.exp(float(log_probs[row, column]) - float(batch.old_log_probs[row, column]))
        loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
        if advantage < 0:
            loss = min(loss, -3.0 * advantage)
        total += loss * float(weights[row, column]) - 0.1 * float(entropys[row, column])
    return total / int((batch.loss_mask if denominator == "kept" else batch.response_mask).sum())


@pytest.mark.parametrize("denominator", ["original", "kept"])
def test_loss_equals_a_float64_loop(denominator: str) -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    log_probs = batch.old_log_probs + 0.4 * torch.randn(6, 7, generator=torch.Generator().manual_seed(3))
    entropys = torch.rand(6, 7, generator=torch.Generator().manual_seed(4))
    loss = objective_of(batch, log_probs, entropys, denominator)
    assert float(loss) == pytest.approx(expected_loss(batch, log_probs, entropys, denominator), rel=1e-5)


def test_more_entropy_means_less_loss_and_rejected_tokens_have_no_gradient() -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    log_probs = batch.old_log_probs.clone().requires_grad_()
    entropys = torch.ones(6, 7, requires_grad=True)
    objective_of(batch, log_probs, entropys, "original").backward()
    assert entropys.grad is not None
    assert log_probs.grad is not None
    assert bool((entropys.grad[batch.loss_mask] < 0).all())
    assert not entropys.grad[~batch.loss_mask].any()
    assert not log_probs.grad[~batch.loss_mask].any()
