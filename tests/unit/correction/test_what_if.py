"""Acceptance of other thresholds, against what the rules themselves accept."""

import math

import pytest
import torch
from appendix_a import random_case, rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import Numbers, acceptance, bound_for_acceptance, compute_rollout_correction, measure

FULL = RolloutCorrectionConfig(diagnostics="full")


def numbers() -> Numbers:
    return measure(*rows(), FULL).numbers()


def test_acceptance_on_the_appendix() -> None:
    # ratios of tokens: 1.105, 0.905, 1.350, 1, 0.135, 1.221, 1, 1, 0.741, 1.221; products: 1.350, 0.165, 0.905
    assert acceptance(numbers(), "token_k1", 0.8, 1.3) == pytest.approx(0.7)
    assert acceptance(numbers(), "seq_sum_k1", 0.5, 2.0) == pytest.approx(2 / 3)
    assert acceptance(numbers(), "seq_mean_k1", 0.9, 1.2) == pytest.approx(2 / 3)


def test_bound_for_an_acceptance_on_the_appendix() -> None:
    # |l| of tokens: three of 0, then 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 2.0
    for share, log_bound in ((0.3, 0.0), (0.5, 0.1), (0.9, 0.3), (1.0, 2.0)):
        assert math.log(bound_for_acceptance(numbers(), "token_k1", share)) == pytest.approx(log_bound, rel=0.04)


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_the_suggested_bound_accepts_about_that_share(rule: str) -> None:
    train, rollout, mask = random_case(400, 6, seed=5)
    bound = bound_for_acceptance(measure(train, rollout, mask, FULL).numbers(), rule, 0.7)
    result = compute_rollout_correction(
        train, rollout, mask, RolloutCorrectionConfig(rollout_rs=rule, rollout_rs_threshold=bound)
    )
    kept = result.keep_mask & mask
    share = kept.sum() / mask.sum() if rule == "token_k1" else kept.any(-1).sum() / mask.any(-1).sum()
    assert float(share) == pytest.approx(0.7, abs=0.03)


def test_nothing_measured_is_nan() -> None:
    train, rollout, mask = rows()
    empty = measure(train, rollout, torch.zeros_like(mask), FULL).numbers()
    assert math.isnan(acceptance(empty, "token_k1", 0.5, 2.0))
    assert math.isnan(bound_for_acceptance(empty, "token_k1", 0.5))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="histograms answer for"):
        acceptance(numbers(), "token_k2", 0.5, 2.0)
    with pytest.raises(ValueError, match="0 < lower <= upper"):
        acceptance(numbers(), "token_k1", 2.0, 0.5)
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        bound_for_acceptance(numbers(), "token_k1", 0.0)
    with pytest.raises(ValueError, match="diagnostics=full"):
        acceptance(measure(*rows(), RolloutCorrectionConfig()).numbers(), "token_k1", 0.5, 2.0)
