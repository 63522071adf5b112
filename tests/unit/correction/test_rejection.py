"""Keep masks of the appendix, and the documented direction of k1 bounds."""

import pytest
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

TOKENS = [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1]]
ROW_1 = [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]]


@pytest.mark.parametrize(
    ("rules", "thresholds", "expected"),
    [
        ("token_k1", "0.8_1.25", TOKENS),
        ("token_k2", 0.03, TOKENS),
        ("token_k3", 0.03, TOKENS),
        ("seq_sum_k1", "0.5_2", ROW_1),
        ("seq_mean_k1", "0.9_1.1111", ROW_1),
        ("seq_sum_k2", 0.1, ROW_1),
        ("seq_mean_k3", 0.05, ROW_1),
        ("seq_max_k2", 0.1, ROW_1),
        ("seq_max_k3", 0.05, ROW_1),
        ("seq_mean_k1", 1.05, [[0] * 4, [0] * 4, [1, 1, 0, 1]]),
        ("token_k1,seq_mean_k3", "0.8_1.25,0.05", [[1, 1, 0, 1], [0] * 4, [1, 0, 0, 1]]),
        ("seq_mean_k1", "0.5_1.05", [[0] * 4, [1, 1, 1, 0], [1, 1, 0, 1]]),
    ],
)
def test_keep_masks(rules: str, thresholds: object, expected: list[list[int]]) -> None:
    config = RolloutCorrectionConfig.model_validate({"rollout_rs": rules, "rollout_rs_threshold": thresholds})
    train, rollout, mask = rows()
    result = compute_rollout_correction(train, rollout, mask, config)
    assert (result.keep_mask & mask).int().tolist() == expected


@pytest.mark.parametrize("rule", ["token_k1", "seq_sum_k1", "seq_mean_k1"])
def test_rows_without_tokens_are_never_rejected(rule: str) -> None:
    config = RolloutCorrectionConfig(
        rollout_rs=rule, rollout_rs_threshold="1.2_3.0", rollout_token_veto_threshold=1.0
    )
    train, rollout, mask = rows()
    mask[1] = False
    result = compute_rollout_correction(train, rollout, mask, config)
    assert result.keep_mask[1].all()
    assert not result.rejected_rows[1]


def test_the_veto_looks_at_low_ratios_only() -> None:
    train, rollout, mask = rows()
    config = RolloutCorrectionConfig(rollout_token_veto_threshold=0.2)
    result = compute_rollout_correction(train, rollout, mask, config)
    assert result.keep_mask.any(-1).tolist() == [True, False, True]
    swapped = compute_rollout_correction(rollout, train, mask, config)
    assert swapped.keep_mask[mask].all()


def test_tokens_that_two_rules_reject_count_once() -> None:
    config = RolloutCorrectionConfig(
        rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="0.8_1.25,0.05", diagnostics="full"
    )
    metrics = compute_rollout_correction(*rows(), config).metrics()
    # token_k1 alone: (0, 2) and (2, 1); both rules: (1, 0); seq_mean_k3 alone: (1, 1) and (1, 2); of ten
    # tokens.
    assert metrics["rollout_corr/rollout_rs_token_k1_masked_fraction"] == pytest.approx(0.3)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k3_masked_fraction"] == pytest.approx(0.3)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_rs_seq_rejected_fraction"] == pytest.approx(1 / 3)
