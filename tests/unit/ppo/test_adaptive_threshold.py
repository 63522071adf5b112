"""A threshold that follows the acceptance it leads to."""

import math

import pytest
import torch
from pydantic import ValidationError

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import measure
from verl_rc.ppo.adaptive_threshold import AdaptiveThreshold

FIELDS = {
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": 3.0,
    "rollout_rs_target_acceptance": 0.75,
    "diagnostics": "full",
}


def test_it_moves_a_tenth_of_the_way_in_logarithms_towards_what_the_batch_would_have_needed() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    ratios = torch.tensor([[1.01, 0.98, 1.25, 6.0]])
    statistics = measure(ratios.log(), torch.zeros(1, 4), torch.ones(1, 4), config)
    adaptive = AdaptiveThreshold.of(config)
    assert adaptive is not None
    assert adaptive.threshold == 3.0
    moved = adaptive.updated(statistics)
    assert math.log(moved.threshold) == pytest.approx(0.9 * math.log(3.0) + 0.1 * math.log(1.25), rel=0.005)
    assert moved.config(config).rejection_bounds()["token_k1"].upper == moved.threshold


def test_it_settles_where_the_wished_share_is_accepted() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    adaptive, generator = AdaptiveThreshold.of(config), torch.Generator().manual_seed(0)
    assert adaptive is not None
    for _ in range(60):
        log_ratio = 0.3 * torch.randn(64, 32, generator=generator)
        adaptive = adaptive.updated(measure(log_ratio, torch.zeros(64, 32), torch.ones(64, 32), config))
    # three quarters of a normal distribution lie within 1.1503 standard deviations
    assert math.log(adaptive.threshold) == pytest.approx(1.1503 * 0.3, rel=0.05)


def test_a_batch_without_tokens_moves_nothing() -> None:
    config = RolloutCorrectionConfig.model_validate(FIELDS)
    adaptive = AdaptiveThreshold.of(config)
    assert adaptive is not None
    assert adaptive.updated(measure(torch.zeros(1, 2), torch.zeros(1, 2), torch.zeros(1, 2), config)) == adaptive


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"diagnostics": "core"}, "histograms of"),
        ({"rollout_rs": "token_k3"}, "one rule out of"),
        ({"rollout_rs_threshold": "0.5_2.0"}, "one number"),
        ({"rollout_rs": "token_k1,seq_mean_k1"}, "one rule out of"),
        ({"rollout_rs_target_acceptance": 1.0}, "less than 1"),
    ],
)
def test_what_it_cannot_follow_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RolloutCorrectionConfig.model_validate({**FIELDS, **change})
