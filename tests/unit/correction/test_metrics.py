"""Metrics of the appendix, what full diagnostics add, and what other thresholds would have accepted."""

import math

import pytest
import torch
from appendix_a import random_case, rows

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import Numbers, bound_for_acceptance, compute_rollout_correction, measure
from verl_rc.correction.metrics import misalignment_z
from verl_rc.metrics.mergeable import Moments

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
    for name, value in {
        **APPENDIX,
        **{f"rollout_is_{name}": value for name, value in WEIGHTS.items()},
    }.items():
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


def moments(*ratios: float) -> Moments[float]:
    excess = [ratio - 1 for ratio in ratios]
    return Moments(total=sum(excess), square=sum(x * x for x in excess), count=len(excess))


def test_the_misalignment_test_needs_two_ratios_and_a_spread() -> None:
    assert misalignment_z(moments(1.5, 0.9)) == pytest.approx(0.2 / (0.3 / math.sqrt(2)))
    assert misalignment_z(moments(1.0, 1.0, 1.0)) == 0.0
    assert misalignment_z(moments()) is misalignment_z(moments(1.0)) is misalignment_z(moments(1.5)) is None
    assert misalignment_z(moments(*[math.exp(0.1)] * 1000)) is None


def test_a_misalignment_test_that_cannot_be_made_is_not_reported() -> None:
    config = RolloutCorrectionConfig(diagnostics="full")
    rollout, mask = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0)), torch.ones(3, 4)

    def reported(train: torch.Tensor) -> float | None:
        metrics = compute_rollout_correction(train, rollout, mask, config).metrics()
        return metrics.get("rollout_corr/misalignment_z")

    assert reported(rollout) == 0.0  # all ratios are exactly 1
    assert reported(rollout.double() + 0.5) is None  # all are the same, but not 1


def full_metrics(**facts: torch.Tensor) -> dict[str, float]:
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_is_threshold=1.2, diagnostics="full")
    return compute_rollout_correction(*rows(), config, **facts).metrics()  # type: ignore[arg-type]


def test_effective_sample_sizes_of_every_level() -> None:
    metrics = full_metrics(group_ids=torch.tensor([0, 0, 1]))
    raw = [math.exp(0.3), math.exp(-1.8), math.exp(-0.1)]
    applied = [1.2, *raw[1:]]
    for kind, w in (("raw", raw), ("applied", applied)):
        assert metrics[f"rollout_corr/rollout_is_ess_{kind}_sequence"] == pytest.approx(
            sum(w) ** 2 / (3 * sum(x * x for x in w))
        )
        prompts = [(w[0] + w[1]) / 2, w[2]]
        expected = sum(prompts) ** 2 / (2 * sum(x * x for x in prompts))
        assert metrics[f"rollout_corr/rollout_is_ess_{kind}_prompt"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "largest", "smallest"), [("token", 1.052502, 0.778445), ("sequence", 1.2, 0.165299)]
)
def test_extreme_row_means_of_the_appendix(level: str, largest: float, smallest: float) -> None:
    config = RolloutCorrectionConfig.model_validate({"rollout_is": level, "rollout_is_threshold": 1.2})
    metrics = compute_rollout_correction(*rows(), config).metrics()
    assert metrics["rollout_corr/rollout_is_seq_max"] == pytest.approx(largest, abs=2e-6)
    assert metrics["rollout_corr/rollout_is_seq_min"] == pytest.approx(smallest, abs=2e-6)


FULL = RolloutCorrectionConfig(diagnostics="full")


def numbers() -> Numbers:
    return measure(*rows(), FULL).numbers()


def test_bound_for_an_acceptance_on_the_appendix() -> None:
    # |l| of tokens: three of 0, then 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 2.0
    for share, log_bound in ((0.3, 0.0), (0.5, 0.1), (0.9, 0.3), (1.0, 2.0)):
        assert math.log(bound_for_acceptance(numbers(), "token_k1", share)) == pytest.approx(
            log_bound, rel=0.04
        )


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
    assert math.isnan(bound_for_acceptance(empty, "token_k1", 0.5))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="histograms answer for"):
        bound_for_acceptance(numbers(), "token_k2", 0.5)
    with pytest.raises(ValueError, match=r"in \(0, 1\]"):
        bound_for_acceptance(numbers(), "token_k1", 0.0)
    with pytest.raises(ValueError, match="diagnostics=full"):
        bound_for_acceptance(
            measure(*rows(), RolloutCorrectionConfig(diagnostics="core")).numbers(), "token_k1", 0.5
        )
