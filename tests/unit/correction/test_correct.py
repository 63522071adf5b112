"""Corrections never crash, read nothing from the device, and the policy for non-finite log-probs does what it
says."""

import pytest
import torch
from appendix_a import random_case, rows
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.config.rollout_correction import REJECTION_RULES, WEIGHT_LEVELS, RolloutCorrectionConfig
from verl_rc.correction import (
    NonFiniteLogProbError,
    SequenceContext,
    compute_rollout_correction,
    correct_sequences,
    measure,
    require_finite,
)

FULL = {"rollout_is": "token", "rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.5"}


def test_parts_corrected_with_the_batchs_statistics_equal_the_whole() -> None:
    train, rollout, mask = random_case(7, 6, seed=3)
    config = RolloutCorrectionConfig.model_validate({**FULL, "rollout_is_batch_normalize": True})
    whole = compute_rollout_correction(train, rollout, mask, config)
    statistics = measure(train, rollout, mask, config)
    parts = [
        correct_sequences(train[part], rollout[part], mask[part], config, SequenceContext(), statistics)
        for part in (slice(i, i + 2) for i in range(0, 7, 2))
    ]
    assert whole.weights is not None
    torch.testing.assert_close(
        torch.cat([part.weights for part in parts if part.weights is not None]), whole.weights
    )
    assert torch.equal(torch.cat([part.keep_mask for part in parts]), whole.keep_mask)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (4, 1), (3, 4)])
@pytest.mark.parametrize("level", ["token", "sequence", "prefix", "geometric"])
@pytest.mark.parametrize("filled", [True, False])
def test_extreme_batches_give_finite_numbers(shape: tuple[int, int], level: str, filled: bool) -> None:
    config = RolloutCorrectionConfig.model_validate(
        {**FULL, "rollout_is": level, "rollout_is_threshold": "0.9_1.1"}
    )
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
        batch = measure(train, rollout, mask, config)
        result = correct_sequences(train, rollout, mask, config, SequenceContext(), batch)
        assert result.weights is not None
        assert result.weights.shape == result.keep_mask.shape == (3, 4)


def everything(level: str) -> RolloutCorrectionConfig:
    """A configuration under which every part of the package runs."""
    return RolloutCorrectionConfig.model_validate(
        {
            "rollout_is": level,
            "rollout_is_batch_normalize": True,
            "rollout_rs": ",".join(REJECTION_RULES),
            "rollout_rs_threshold": [
                "1.2" if rule.bounds_ratio else 0.9 for rule in REJECTION_RULES.values()
            ],
            "rollout_token_veto_threshold": 0.3,
            "rollout_opsm_threshold": 0.1,
            "diagnostics": "full",
        }
    )


@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_slices_of_rows_change_nothing(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    train, rollout, mask = random_case(9, 5, seed=4)
    facts = {
        "advantages": train - train.mean(),
        "group_ids": list("aabbccdde"),
        "policy_versions": torch.arange(9),
        "scores": train[:, 0],
    }
    whole = compute_rollout_correction(train, rollout, mask, everything(level), **facts)
    monkeypatch.setattr("verl_rc.correction.batch._SLICE_ELEMENTS", 10)  # two rows at a time
    sliced = compute_rollout_correction(train, rollout, mask, everything(level), **facts)
    assert whole.weights is not None
    assert sliced.weights is not None
    torch.testing.assert_close(sliced.weights, whole.weights, rtol=1e-13, atol=0)
    assert torch.equal(sliced.keep_mask, whole.keep_mask)
    assert torch.equal(sliced.rejected_rows, whole.rejected_rows)
    assert sliced.metrics() == pytest.approx(whole.metrics(), rel=1e-10, nan_ok=True)


@pytest.mark.parametrize("level", WEIGHT_LEVELS)
def test_full_diagnostics_read_nothing_from_the_device(level: str) -> None:
    with FakeTensorMode():
        log_probs, mask = torch.empty(3, 4), torch.ones(3, 4, dtype=torch.bool)
        result = compute_rollout_correction(
            log_probs,
            log_probs,
            mask,
            everything(level),
            advantages=log_probs,
            group_ids=torch.zeros(3, dtype=torch.int64),
            policy_versions=torch.zeros(3, 4, dtype=torch.int64),
            scores=torch.empty(3),
        )
        assert result.weights is not None
        assert result.weights.shape == result.keep_mask.shape == (3, 4)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32)]
)
def test_weights_are_at_least_float32(dtype: torch.dtype, expected: torch.dtype) -> None:
    train, rollout, mask = (x.to(dtype) for x in random_case(3, 4, seed=0))
    result = compute_rollout_correction(train, rollout, mask, RolloutCorrectionConfig(rollout_is="sequence"))
    assert result.weights is not None
    assert result.weights.dtype == expected


def test_equal_policies_are_left_exactly_alone() -> None:
    train, _, mask = random_case(6, 5, seed=8)
    for level in WEIGHT_LEVELS:
        config = RolloutCorrectionConfig.model_validate(
            {"rollout_is": level, "rollout_is_batch_normalize": True}
        )
        result = compute_rollout_correction(train, train.clone(), mask, config)
        assert result.weights is not None
        assert torch.equal(result.weights, mask.double())
        assert result.keep_mask.all()


def test_rejected_rows_are_those_without_a_kept_token() -> None:
    train, rollout, mask = rows()
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold="1.2_9.0")
    result = compute_rollout_correction(train, rollout, mask, config)
    assert result.rejected_rows.tolist() == [False, False, False]
    mask = mask & torch.tensor([[True] * 4, [True, False, True, False], [False] * 4])
    result = compute_rollout_correction(train, rollout, mask, config)
    assert result.rejected_rows.tolist() == [False, True, False]


def test_shapes_must_match() -> None:
    train, rollout, mask = rows()
    with pytest.raises(ValueError, match=r"one shape \[B, T\]; got \[3, 4\], \[3, 4\] and \[3, 3\]"):
        compute_rollout_correction(train, rollout, mask[:, :3], RolloutCorrectionConfig())


TWO_RULES = RolloutCorrectionConfig(
    rollout_is="token",
    rollout_rs="token_k1,seq_mean_k3",
    rollout_rs_threshold="0.6_1.6,0.1",
    diagnostics="full",
)


def test_memory_in_another_order_and_a_mask_of_numbers() -> None:
    train, rollout, mask = random_case(6, 9, seed=1)
    turned = [x.T.contiguous().T for x in (train, rollout, 3.0 * mask)]
    assert not turned[0].is_contiguous()
    found, expected = (
        compute_rollout_correction(*case, TWO_RULES) for case in (turned, (train, rollout, mask))
    )
    assert found.weights is not None
    assert expected.weights is not None
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.keep_mask, expected.keep_mask)
    assert found.metrics() == expected.metrics()


def test_inputs_are_left_as_they_are() -> None:
    case = random_case(6, 9, seed=2)
    copies = [x.clone() for x in case]
    compute_rollout_correction(*case, TWO_RULES)
    assert all(torch.equal(x, copy) for x, copy in zip(case, copies, strict=True))


SHARE = 0.02


def test_the_configured_share_decides() -> None:
    require_finite(SHARE, RolloutCorrectionConfig(nonfinite_stop_fraction=0.02))
    with pytest.raises(NonFiniteLogProbError, match=r"at most 1\.00% .* got 2\.00%"):
        require_finite(SHARE, RolloutCorrectionConfig())


def test_raise_allows_none() -> None:
    with pytest.raises(NonFiniteLogProbError, match=r"at most 0\.00%"):
        require_finite(SHARE, RolloutCorrectionConfig(nonfinite_logprob="raise"))
