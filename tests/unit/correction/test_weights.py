"""Weights of every level on the appendix' rows."""

import math

import pytest
import torch
from appendix_a import rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"rollout_is": "token", "rollout_is_threshold": 1.2},
            [[1.105171, 0.904837, 1.2, 1.0], [0.135335, 1.2, 1.0, 0.0], [1.0, 0.740818, 0.0, 1.2]],
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 1.2},
            [[1.2] * 4, [0.165299] * 3 + [0.0], [0.904837, 0.904837, 0.0, 0.904837]],
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25"},
            [[1.105171, 0.904837, 0.0, 1.0], [0.0, 1.221403, 1.0, 0.0], [1.0, 0.0, 0.0, 1.221403]],
        ),
        (
            {"rollout_is": "token", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
            [
                [1.165035, 0.953850, 1.265001, 1.054167],
                [0.142666, 1.265001, 1.054167, 0.0],
                [1.054167, 0.780946, 0.0, 1.265001],
            ],
        ),
        (
            {"rollout_is": "sequence", "rollout_is_threshold": 1.2, "rollout_is_batch_normalize": True},
            [[1.585808] * 4, [0.218444] * 3 + [0.0], [1.195749, 1.195749, 0.0, 1.195749]],
        ),
        (
            {"rollout_is": "geometric", "rollout_is_threshold": 10.0},
            [[1.077884] * 4, [0.548812] * 3 + [0.0], [0.967216, 0.967216, 0.0, 0.967216]],
        ),
        (
            {"rollout_is": "prefix", "rollout_is_threshold": 10.0},
            [
                [1.105171, 1.0, 1.349859, 1.349859],
                [0.135335, 0.165299, 0.165299, 0.0],
                [1.0, 0.740818, 0.0, 0.904837],
            ],
        ),
    ],
)
def test_weights_of_the_appendix(fields: dict[str, object], expected: list[list[float]]) -> None:
    result = compute_rollout_correction(*rows(), RolloutCorrectionConfig.model_validate(fields))
    assert result.weights is not None
    torch.testing.assert_close(result.weights, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=2e-6)


def test_weights_carry_no_gradient() -> None:
    train, rollout, mask = rows(0.0)
    config = RolloutCorrectionConfig(rollout_is="token")
    result = compute_rollout_correction(train.requires_grad_(), rollout, mask, config)
    assert result.weights is not None
    assert not result.weights.requires_grad


def test_a_rollout_log_prob_of_minus_infinity_never_gets_the_largest_weight() -> None:
    train, rollout, mask = rows()
    rollout[0, 1] = float("-inf")
    result = compute_rollout_correction(train, rollout, mask, RolloutCorrectionConfig(rollout_is="token"))
    assert result.weights is not None
    assert result.weights[0, 1] == 0
    assert not result.keep_mask[0].any()


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2 / 3), ("sqrt", math.sqrt(2 / 3)), (None, 1.0)])
def test_the_learning_rate_follows_the_effective_sample_size(rule: str | None, factor: float) -> None:
    """Weights 4, 1 and 1: ``(4 + 1 + 1)^2 / (3 (16 + 1 + 1)) = 2/3``."""
    config = RolloutCorrectionConfig.decoupled_seq_is(10.0).model_copy(update={"scale_lr_by_ess": rule})
    train = torch.tensor([[math.log(4)], [0.0], [0.0]])
    mask = torch.ones(3, 1, dtype=torch.bool)
    result = compute_rollout_correction(train, torch.zeros(3, 1), mask, config)
    assert result.learning_rate_factor() == pytest.approx(factor, rel=1e-6)
