"""Off-policy metrics of the appendix, and effective sample sizes within [0, 1]."""

import pytest
import torch
from appendix_a import random_case, rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

APPENDIX = {
    "training_ppl": 2.889127,
    "training_log_ppl": 1.022222,
    "rollout_ppl": 2.319572,
    "rollout_log_ppl": 0.836111,
    "kl": 0.16,
    "k3_kl": 0.127883,
    "log_ppl_diff": 0.186111,
    "log_ppl_abs_diff": 0.236111,
    "log_ppl_diff_max": 0.6,
    "log_ppl_diff_min": -0.075,
    "ppl_ratio": 1.261252,
    "chi2_token": 0.041303,
    "chi2_seq": -0.110609,
}
WEIGHTS = {
    "mean": 0.948616,
    "std": 0.304719,
    "ratio_fraction_high": 0.3,
    "ratio_fraction_low": 0.2,
    "seq_mean": 0.937073,
    "seq_std": 0.142044,
    "seq_max_deviation": 0.221555,
    "eff_sample_size": 0.906466,
}


def test_metrics_of_the_appendix() -> None:
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.2)
    metrics = compute_rollout_correction(*rows(), config).metrics()
    for name, value in {**APPENDIX, **{f"rollout_is_{name}": value for name, value in WEIGHTS.items()}}.items():
        assert metrics[f"rollout_corr/{name}"] == pytest.approx(value, abs=2e-6), name


def test_three_empty_rows_change_nothing() -> None:
    train, rollout, mask = rows()
    config = RolloutCorrectionConfig(rollout_is="sequence")
    padded = [torch.cat([x, torch.zeros(3, 4, dtype=x.dtype)]) for x in (train, rollout, mask)]
    assert compute_rollout_correction(*padded, config).metrics() == pytest.approx(
        compute_rollout_correction(train, rollout, mask, config).metrics()
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_effective_sample_size_is_a_fraction(level: str, scale: float) -> None:
    for seed in range(20):
        train, rollout, mask = random_case(6, 5, seed)
        config = RolloutCorrectionConfig.model_validate({"rollout_is": level})
        metrics = compute_rollout_correction(scale * train, rollout, mask, config).metrics()
        assert 0.0 <= metrics["rollout_corr/rollout_is_eff_sample_size"] <= 1.0
