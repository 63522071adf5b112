"""What full diagnostics add, checked on weights that can be read."""

import math

import pytest
import torch
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction


def full_metrics(**facts: torch.Tensor) -> dict[str, float]:
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1.2, diagnostics="full")
    return compute_rollout_correction(*rows(), config, **facts).metrics()  # type: ignore[arg-type]


def test_effective_sample_sizes_of_every_level() -> None:
    metrics = full_metrics(group_ids=torch.tensor([0, 0, 1]))
    raw = [math.exp(0.3), math.exp(-1.8), math.exp(-0.1)]
    applied = [1.2, *raw[1:]]
    for kind, w in (("raw", raw), ("applied", applied)):
        assert metrics[f"rollout_corr/rollout_is_ess_{kind}_sequence"] == pytest.approx(sum(w) ** 2 / (3 * sum(x * x for x in w)))
        prompts = [(w[0] + w[1]) / 2, w[2]]
        expected = sum(prompts) ** 2 / (2 * sum(x * x for x in prompts))
        assert metrics[f"rollout_corr/rollout_is_ess_{kind}_prompt"] == pytest.approx(expected)


def test_percentiles_are_within_four_percent() -> None:
    metrics = full_metrics()
    assert metrics["rollout_corr/log_ratio_p1"] == pytest.approx(-2.0, rel=0.04)
    assert metrics["rollout_corr/log_ratio_p99"] == pytest.approx(0.3, rel=0.04)
    assert metrics["rollout_corr/log_ratio_exact_fraction"] == pytest.approx(0.3)


def test_gap_by_age() -> None:
    versions = torch.tensor([[3, 3, 3, 3], [2, 2, 2, 2], [3, 3, 3, 3]])
    metrics = full_metrics(policy_versions=versions)
    assert metrics["rollout_corr/age_1_token_fraction"] == pytest.approx(0.3)
    assert metrics["rollout_corr/age_1_kl"] == pytest.approx(0.6)
    assert metrics["rollout_corr/token_age_max"] == 1.0
