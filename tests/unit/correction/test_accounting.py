"""Rejected tokens are counted once: by the rule that alone rejects them, or as an overlap."""

import pytest
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction


def test_exclusive_and_overlapping_shares_add_up() -> None:
    config = RolloutCorrectionConfig(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.8_1.25,0.05", diagnostics="full")
    metrics = compute_rollout_correction(*rows(), config).metrics()
    # token_k1 alone: (0, 2) and (2, 1); both rules: (1, 0); seq_mean_k3 alone: (1, 1) and (1, 2); of ten tokens.
    assert metrics["rollout_corr/rollout_rs_token_k1_exclusive_fraction"] == pytest.approx(0.2)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k3_exclusive_fraction"] == pytest.approx(0.2)
    assert metrics["rollout_corr/rollout_rs_overlap_fraction"] == pytest.approx(0.1)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_rs_seq_rejected_fraction"] == pytest.approx(1 / 3)
