"""The loss that is differentiated, against a float64 loop."""

import math
from pathlib import Path

import pytest
import torch
from small_models import make_train_batch, small_run_config

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.data.batches import CriticBatch, TokenScores, TrainBatch
from verl_rc.losses import Aggregation
from verl_rc.ppo.objective import policy_objective, value_objective

LENGTHS, REJECTED = [7, 2, 5, 0, 1, 6], (2,)


def correction(denominator: str = "original", **fields: object) -> RolloutCorrectionConfig:
    rule = {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0} if denominator == "kept" else {}
    return RolloutCorrectionConfig.model_validate({**rule, "rejection_denominator": denominator, **fields})


def objective_of(batch: TrainBatch, log_probs: torch.Tensor, entropys: torch.Tensor, denominator: str) -> torch.Tensor:
    actor = small_run_config(Path("unused"), "actor_rollout_ref.actor.entropy_coeff=0.1").actor_rollout_ref.actor
    counted = batch.loss_mask if denominator == "kept" else batch.response_mask
    totals = Aggregation("token-mean", num_tokens=int(counted.sum()), num_sequences=int(counted.any(-1).sum()))
    return policy_objective(TokenScores(log_probs, entropys), batch, actor, correction(denominator), totals).loss


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


def test_the_kl_term_is_added_with_its_weight_over_kept_tokens() -> None:
    batch = make_train_batch(LENGTHS, REJECTED)
    batch.ref_log_prob = batch.old_log_probs - 0.3
    overrides = ["actor_rollout_ref.actor.kl_loss_coef=0.5", "actor_rollout_ref.actor.kl_loss_type=k2"]
    plain, with_kl = (
        small_run_config(Path("unused"), f"actor_rollout_ref.actor.use_kl_loss={use}", *overrides).actor_rollout_ref.actor
        for use in (False, True)
    )
    totals = Aggregation("token-mean", num_tokens=int(batch.response_mask.sum()), num_sequences=5)
    scores = TokenScores(batch.old_log_probs, None)
    without = policy_objective(scores, batch, plain, correction(), totals)
    found = policy_objective(scores, batch, with_kl, correction(), totals)
    kept, counted = int(batch.loss_mask.sum()), int(batch.response_mask.sum())
    assert float(found.loss - without.loss) == pytest.approx(0.5 * (0.3**2 / 2) * kept / counted, rel=1e-4)
    assert float(found.averages["actor/kl_loss"].mean()) == pytest.approx(0.3**2 / 2, rel=1e-4)


def test_bypass_mode_chooses_reinforce_where_it_is_asked_for() -> None:
    batch = make_train_batch(LENGTHS)
    log_probs = batch.old_log_probs + 0.7
    actor = small_run_config(Path("unused")).actor_rollout_ref.actor
    totals = Aggregation("token-sum")
    config = correction(bypass_mode=True, loss_type="reinforce")
    loss = policy_objective(TokenScores(log_probs, None), batch, actor, config, totals).loss
    assert batch.rollout_is_weights is not None
    expected = -(batch.advantages * log_probs * batch.rollout_is_weights)[batch.loss_mask].double().sum()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_value_loss_equals_a_float64_loop() -> None:
    generator = torch.Generator().manual_seed(5)
    batch = make_train_batch(LENGTHS)
    old, returns, values = (torch.randn(6, 7, generator=generator) for _ in range(3))
    critic_batch = CriticBatch(
        tokens=batch.tokens, response_mask=batch.response_mask, old_values=old, returns=returns, batch_size=[6]
    )
    config = small_run_config(Path("unused"), "critic.cliprange_value=0.4").critic
    total = 0.0
    for row, column in batch.response_mask.nonzero().tolist():
        value, before, target = (float(tensor[row, column]) for tensor in (values, old, returns))
        clipped = min(max(value, before - 0.4), before + 0.4)
        total += 0.5 * max((value - target) ** 2, (clipped - target) ** 2)
    tokens = int(batch.response_mask.sum())
    found = value_objective(values, critic_batch, config, Aggregation("token-mean", num_tokens=tokens)).loss
    assert float(found) == pytest.approx(total / tokens, rel=1e-5)
