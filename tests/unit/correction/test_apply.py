"""Corrections never crash, and the policy for non-finite log-probs does what it says."""

import pytest
import torch
from appendix_a import random_case, rows
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import apply, compute_rollout_correction, measure

FULL = {"rollout_is": "token", "rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.5"}


def test_apply_on_parts_with_the_batchs_statistics_equals_the_whole() -> None:
    train, rollout, mask = random_case(7, 6, seed=3)
    config = RolloutCorrectionConfig.model_validate({**FULL, "rollout_is_batch_normalize": True})
    whole = compute_rollout_correction(train, rollout, mask, config)
    statistics = measure(train, rollout, mask, config)
    parts = [apply(train[i : i + 2], rollout[i : i + 2], mask[i : i + 2], config, statistics) for i in range(0, 7, 2)]
    assert whole.weights is not None
    torch.testing.assert_close(torch.cat([weights for weights, _ in parts if weights is not None]), whole.weights)
    assert torch.equal(torch.cat([keep for _, keep in parts]), whole.keep_mask)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (3, 4)])
@pytest.mark.parametrize("level", ["token", "sequence", "prefix", "geometric"])
@pytest.mark.parametrize("filled", [True, False])
def test_extreme_batches_give_finite_numbers(shape: tuple[int, int], level: str, filled: bool) -> None:
    config = RolloutCorrectionConfig.model_validate({**FULL, "rollout_is": level, "rollout_is_threshold": "0.9_1.1"})
    train = torch.full(shape, -50.0)
    result = compute_rollout_correction(train, torch.zeros(shape), torch.full(shape, filled), config)
    assert result.weights is not None
    assert not result.weights.any()
    assert result.keep_mask.any() == (not filled)
    metrics = result.metrics()
    assert all(value == value for value in metrics.values())
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 0.0


@pytest.mark.parametrize(
    ("policy", "kept"), [("reject_sequence", [0, 3, 3]), ("reject_token", [3, 3, 3]), ("neutral", [4, 3, 3])]
)
def test_nonfinite_policies(policy: str, kept: list[int]) -> None:
    train, rollout, mask = rows()
    train[0, 2] = float("nan")
    config = RolloutCorrectionConfig.model_validate({"rollout_is": "token", "nonfinite_logprob": policy})
    result = compute_rollout_correction(train, rollout, mask, config)
    assert (result.keep_mask & mask).sum(-1).tolist() == kept
    assert result.weights is not None
    assert torch.isfinite(result.weights).all()
    assert float(result.weights[0, 2]) == (1.0 if policy == "neutral" else 0.0)
    assert result.metrics()["rollout_corr/nonfinite_token_fraction"] == pytest.approx(0.1)


def test_raise_raises() -> None:
    train, rollout, mask = rows()
    train[0, 2] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite, got 10"):
        compute_rollout_correction(train, rollout, mask, RolloutCorrectionConfig(nonfinite_logprob="raise"))


def test_nothing_is_read_from_the_device() -> None:
    config = RolloutCorrectionConfig.model_validate({**FULL, "rollout_is_batch_normalize": True})
    with FakeTensorMode():
        train, rollout, mask = torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(3, 4, dtype=torch.bool)
        weights, keep = apply(train, rollout, mask, config, measure(train, rollout, mask, config))
        assert weights is not None
        assert weights.shape == keep.shape == (3, 4)
