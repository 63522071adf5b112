"""Differences and correlation of probabilities against the standard library."""

import math
import statistics

import pytest
import torch
from appendix_a import random_case, rows

from verl_rc.ppo.batch_metrics import probability_gap


@pytest.mark.parametrize("seed", range(3))
def test_against_the_standard_library(seed: int) -> None:
    train, rollout, mask = random_case(7, 6, seed)
    p, q = ([math.exp(x) for x in log_probs[mask].tolist()] for log_probs in (train, rollout))
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    train[~mask], rollout[~mask] = math.nan, -math.inf
    assert probability_gap(train, rollout, mask) == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": statistics.fmean(gaps),
            "training/rollout_probs_diff_max": max(gaps),
            "training/rollout_probs_diff_std": statistics.pstdev(gaps),
            "training/rollout_actor_probs_pearson_corr": statistics.correlation(p, q),
        }
    )


def test_nothing_to_compare() -> None:
    train, rollout, mask = rows()
    assert probability_gap(train, rollout, torch.zeros_like(mask)) == {"training/rollout_probs_diff_valid": 0.0}
    assert probability_gap(train[:0], rollout[:0], mask[:0]) == {"training/rollout_probs_diff_valid": 0.0}


def test_constant_probabilities_have_no_correlation() -> None:
    gap = probability_gap(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3))
    assert "training/rollout_actor_probs_pearson_corr" not in gap
    assert gap["training/rollout_probs_diff_max"] == 0.0
