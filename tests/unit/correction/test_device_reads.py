"""Correction, the policy's objective and the bypass update wait for the device at the announced copies and
nowhere else."""

from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from appendix_a import random_case
from bypass_cases import CASES, case_batch, case_config, case_id
from host_reads import HostReads
from small_models import small_run_config
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from verl_rc.algorithm.losses import Aggregation
from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.in_actor import MiniBatchCorrection, OverRanks
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.algorithm.ppo.objective import policy_objective
from verl_rc.config.rollout_correction import WEIGHT_LEVELS, RolloutCorrectionConfig
from verl_rc.correction import bound_for_acceptance, compute_rollout_correction
from verl_rc.records.batches import TokenScores, TrainBatch

ACTOR = small_run_config(Path("unused")).actor_rollout_ref.actor
NUMBERS = "correction/statistics.py:_numbers"
"""All statistics in one copy."""
COUNTS = "algorithm/ppo/in_actor.py:_totals"
"""What is in the loss."""


ONE_RANK = OverRanks(sum=lambda tensor: tensor, maximum=lambda tensor: tensor)
SHARE = MiniBatch([[0, 1], [2, 3, 4, 5]], num_tokens=10, num_sequences=4, num_loss_tokens=10)


@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_the_driver_reads_all_statistics_in_one_copy(level: str) -> None:
    train, rollout, mask = random_case(9, 5, seed=4)
    config = RolloutCorrectionConfig.model_validate(
        {
            "rollout_is": level,
            "rollout_is_batch_normalize": True,
            "rollout_rs": "token_k1,seq_mean_k3,seq_max_bkl",
            "rollout_rs_threshold": "0.5_2.0,0.2,0.5",
            "rollout_token_veto_threshold": 0.1,
            "rollout_opsm_threshold": 0.1,
            "diagnostics": "full",
        }
    )
    with HostReads() as reads:
        result = compute_rollout_correction(
            train,
            rollout,
            mask,
            config,
            advantages=train - rollout,
            group_ids=list("aabbccdde"),
            policy_versions=torch.arange(9),
            scores=train[:, 0],
        )
        assert not reads.places
        assert result.metrics()
        bound_for_acceptance(result.statistics.numbers(), "token_k1", 0.9)
    assert Counter(reads.places) == {NUMBERS: 1}


def corrected_losses(
    batch: TrainBatch, log_probs: Tensor, config: RolloutCorrectionConfig, correction: MiniBatchCorrection
) -> None:
    """Correct and differentiate a mini-batch in two micro-batches."""
    totals = Aggregation("token-mean", num_tokens=10, num_sequences=4)
    for rows in (slice(0, 2), slice(2, None)):
        current = log_probs[rows].detach().requires_grad_()
        scores = TokenScores(current, torch.zeros_like(current))
        part, _ = correction.correct(cast(TrainBatch, batch[rows]), scores)
        policy_objective(scores, part, ACTOR, config, totals).loss.backward()
        assert current.grad is not None


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_the_actor_reads_its_statistics_and_its_counts_once_a_mini_batch(case: dict[str, Any]) -> None:
    batch, config, log_probs = case_batch(case), case_config(case), torch.tensor(case["log_probs"])
    correction = corrector_of(config).during_update(0, 1, ONE_RANK)
    with HostReads() as reads:
        corrected_losses(batch, log_probs, config, correction)
        assert not reads.places
        correction.end_mini_batch(SHARE, num_updates=0)
    assert Counter(reads.places) == {NUMBERS: 1, COUNTS: 1}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_micro_batches_are_corrected_without_a_wait_for_the_device(case: dict[str, Any]) -> None:
    config = case_config(case)
    with FakeTensorMode():
        batch, log_probs = case_batch(case), torch.tensor(case["log_probs"])
        correction = corrector_of(config).during_update(0, 1, ONE_RANK)
        corrected_losses(batch, log_probs, config, correction)
        with pytest.raises(DataDependentOutputException):
            correction.end_mini_batch(SHARE, num_updates=0)  # the announced copy
