"""Rollout correction of the current policy: golden losses, and the whole mini-batch from its parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bypass_cases import CASES, case_batch, case_config, case_id
from small_models import make_train_batch, small_run_config

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.data.batches import TokenScores
from verl_rc.losses import Aggregation
from verl_rc.ppo.choices import needs_statistics_first
from verl_rc.ppo.objective import correct_current, kept_counts, measure_current, policy_objective


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_golden_loss_gradient_and_keep_mask(case: dict[str, Any]) -> None:
    batch, config = case_batch(case), case_config(case)
    log_probs = torch.tensor(case["log_probs"]).requires_grad_()
    statistics = measure_current(batch, log_probs.detach(), config, policy_version=0)
    corrected = correct_current(batch, log_probs.detach(), config, statistics)
    counts = kept_counts(statistics)
    totals = Aggregation(case["loss_agg_mode"], num_tokens=counts.num_tokens, num_sequences=counts.num_sequences)
    actor = small_run_config(Path("unused")).actor_rollout_ref.actor
    objective = policy_objective(TokenScores(log_probs, None), corrected, actor, config, totals)
    objective.loss.backward()
    expected = case["expected"]
    assert float(objective.loss) == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected["grad"]), rtol=1e-5, atol=1e-7)
    keep = torch.tensor(expected["keep_mask"]).bool()
    assert torch.equal(corrected.loss_mask, keep & batch.response_mask)


def test_parts_of_a_mini_batch_are_normalised_by_all_of_it() -> None:
    config = RolloutCorrectionConfig(bypass_mode=True, loss_type="reinforce", rollout_is="token", rollout_is_batch_normalize=True)
    assert needs_statistics_first(config)
    batch = make_train_batch([7, 2, 5, 1])
    log_probs = batch.rollout_log_probs + 0.5 * torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    whole = measure_current(batch, log_probs, config, 0)
    parts = [measure_current(batch[rows], log_probs[rows], config, 0) for rows in (slice(0, 1), slice(1, 4))]
    merged = parts[0].merge(parts[1])
    mean = torch.minimum((log_probs - batch.rollout_log_probs).exp(), torch.tensor(2.0))[batch.response_mask].double().mean()
    for statistics in (whole, merged):
        weights = correct_current(batch[1:], log_probs[1:], config, statistics).rollout_is_weights
        ratio = (log_probs - batch.rollout_log_probs)[1:].exp().clamp(max=2.0)
        torch.testing.assert_close(weights[batch.response_mask[1:]], (ratio / mean).float()[batch.response_mask[1:]])


def test_ppo_clip_takes_no_weights() -> None:
    config = RolloutCorrectionConfig(bypass_mode=True, rollout_is="token")
    batch = make_train_batch([3, 2])
    statistics = measure_current(batch, batch.rollout_log_probs, config, 0)
    assert correct_current(batch, batch.rollout_log_probs, config, statistics).rollout_is_weights is None
    assert not needs_statistics_first(config)


def test_token_ages_count_from_the_version_given() -> None:
    config = RolloutCorrectionConfig(bypass_mode=True, diagnostics="full")
    batch = make_train_batch([3, 2])
    batch.policy_versions = torch.where(batch.response_mask, 4, -1)
    metrics = measure_current(batch, batch.rollout_log_probs, config, policy_version=6).metrics(config)
    assert metrics["rollout_corr/token_age_mean"] == 2.0
