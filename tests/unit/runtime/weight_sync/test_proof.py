"""Receipts and gap limits: each planted fault is named."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from verl_rc.config.rollout import SyncProofConfig
from verl_rc.metrics.bounds import least_precise
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec
from verl_rc.runtime.weight_sync.proof import (
    GapLimit,
    LoadReceipt,
    LogProbGap,
    SyncProofError,
    check_receipts,
)
from verl_rc.runtime.weight_sync.sender import SendReceipt
from verl_rc.trainer.weights import CANARY_TOKENS

MANIFEST = Manifest((TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))))
SENT = SendReceipt({"a": 1, "b": 2})


def receipt(**changes: Any) -> LoadReceipt:
    return replace(LoadReceipt({"a": 1, "b": 2}, []), **changes)


def test_a_complete_update_passes() -> None:
    check_receipts(MANIFEST, SENT, [[receipt()], [receipt(), receipt()]], version=3)


@pytest.mark.parametrize(
    ("sent", "received", "message"),
    [
        (SendReceipt({"a": 1}), receipt(), "all 2 tensors must be sent, missing b"),
        (SENT, receipt(digests={"a": 1}), "received 1, missing b"),
        (SENT, receipt(digests={"a": 1, "b": 7}), "differ for b"),
        (SENT, receipt(not_loaded=["lm_head.weight"]), "untouched: lm_head.weight"),
        (SENT, receipt(unread=["lm_head.weight"]), "ignores lm_head.weight: they compute different numbers"),
    ],
)
def test_each_fault_is_named(sent: SendReceipt, received: LoadReceipt, message: str) -> None:
    with pytest.raises(SyncProofError, match=message):
        check_receipts(MANIFEST, sent, [[received]], version=3)


def test_gap_counts_masked_positions_only() -> None:
    engine = SimpleNamespace(
        rollout_log_probs=torch.tensor([-1.5, -2.0, float("nan")]),
        response_mask=torch.tensor([True, True, False]),
    )
    gap = LogProbGap.between(torch.tensor([-1.0, -2.0, 5.0]), cast(Any, engine))
    assert gap == LogProbGap(mean=0.25, maximum=0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_tokens_without_finite_log_probs_are_counted_and_no_gap_is_that_of_them_alone(bad: float) -> None:
    ours, theirs = torch.tensor([-1.0, -2.0, bad, -1.0]), torch.tensor([-1.5, -2.0, -1.0, bad])

    def gap(tokens: slice) -> LogProbGap | None:
        every = torch.ones(4, dtype=torch.bool)[tokens]
        engine = SimpleNamespace(rollout_log_probs=theirs[tokens], response_mask=every)
        return LogProbGap.between(ours[tokens], cast(Any, engine))

    assert gap(slice(0, 4)) == LogProbGap(0.25, 0.5, num_nonfinite=2)
    assert gap(slice(2, 4)) is None


def test_a_first_step_beyond_the_engines_precision_is_refused() -> None:
    with pytest.raises(SyncProofError, match=r"at most 0\.0001 nats"):
        GapLimit.for_precision("float32").calibrate(LogProbGap(0.05, 0.4), None, "step 1")


def test_the_limit_is_calibrated_at_the_first_step() -> None:
    limit = GapLimit.for_precision("fp8_weights")
    calibrated = limit.calibrate(LogProbGap(0.03, 1.4), None, "step 1")
    assert limit.limit(calibrated) == calibrated == pytest.approx(0.12)
    assert limit.calibrate(LogProbGap(0.11, 1.4), calibrated, "step 2") == calibrated
    assert (
        limit.calibrate(LogProbGap(1.19, 1.4), calibrated, "step 3") == calibrated
    )  # unusual, and no fault yet
    with pytest.raises(SyncProofError, match=r"at most 1\.2 nats"):
        limit.calibrate(LogProbGap(1.21, 1.4), calibrated, "step 4")


def test_in_float32_nothing_but_a_fault_widens_the_gap() -> None:
    limit = GapLimit.for_precision("float32")
    calibrated = limit.calibrate(LogProbGap(2e-5, 1e-4), None, "step 1")
    assert limit.fault(calibrated) == calibrated == pytest.approx(8e-5)
    assert limit.calibrate(LogProbGap(9e-5, 1e-4), None, "step 1") == 1e-4
    with pytest.raises(SyncProofError):
        limit.calibrate(LogProbGap(9e-5, 1e-4), calibrated, "step 2")


@pytest.mark.parametrize("precision", ["bfloat16", "fp8_weights", "fp8_kv_cache"])
def test_a_first_gap_beyond_what_was_measured_neither_ends_the_run_nor_sets_what_is_usual(
    precision: str,
) -> None:
    limit = GapLimit.for_precision(precision)
    usual = limit.limit(None)
    unusual, ordinary = LogProbGap(1.5 * usual, 9.0), LogProbGap(0.9 * usual, 9.0)
    assert limit.calibrate(unusual, None, "step 1") is None
    assert limit.limit(None) < unusual.mean  # an alert
    assert limit.calibrate(ordinary, None, "step 2") == pytest.approx(4 * ordinary.mean)
    with pytest.raises(SyncProofError):
        limit.calibrate(LogProbGap(10.1 * usual, 20.0), None, "step 1")


def stopped(limit: GapLimit, tokens: int, mean: float, seed: int) -> bool:
    """Whether a healthy run of 500 steps ends by the gap of its canary tokens, every 50 steps.

    Gaps of tokens are lognormal, in bf16; their mean doubles over the run, as training sharpens the
    distribution.
    """
    generator, calibrated = torch.Generator().manual_seed(seed), None
    try:
        for step in range(0, 501, 50):
            scattered = torch.exp(1.5 * torch.randn(tokens, generator=generator) - 1.5**2 / 2)
            gaps = (mean * (1 + step / 500) * scattered).bfloat16().double()
            calibrated = limit.calibrate(
                LogProbGap(float(gaps.mean()), float(gaps.max())), calibrated, f"step {step}"
            )
    except SyncProofError:
        return True
    return False


@pytest.mark.parametrize("mean", [0.003, 0.01, 0.03, 0.1])
def test_a_healthy_run_is_not_ended_by_its_gap(mean: float) -> None:
    """C4: fewer than 1 % of 1,000 runs."""
    tokens = SyncProofConfig().canary_num_prompts * CANARY_TOKENS
    limit = GapLimit.for_precision("bfloat16")
    assert tokens >= 512
    assert sum(stopped(limit, tokens, mean, seed) for seed in range(1000)) < 10


def test_the_rule_before_ended_most_of_them() -> None:
    """48 tokens, and the calibrated limit, never above 0.06, as the end of a run."""
    limit = GapLimit(plausible=0.06)
    assert sum(stopped(limit, 48, 0.03, seed) for seed in range(200)) > 100


def test_a_configured_limit_is_not_calibrated() -> None:
    limit = GapLimit.for_precision("fp8_weights", fixed=0.5)
    assert limit.limit(limit.calibrate(LogProbGap(0.4, 1.4), None, "step 1")) == 0.5


def test_not_a_number_is_refused() -> None:
    with pytest.raises(SyncProofError):
        GapLimit.for_precision("fp8_kv_cache").calibrate(LogProbGap(float("nan"), 0.0), None, "step 1")


def test_precision_is_the_least_precise_part() -> None:
    assert least_precise("float32", None, "auto", "float32") == "float32"
    assert (
        least_precise("float32", None, "auto", "bfloat16") == "bfloat16"
    )  # the default trainer beside a precise engine
    assert least_precise("float16", None, "auto", "bfloat16") == "bfloat16"
    assert least_precise("float16", None, "auto", "float32") == "float16"
    assert least_precise("bfloat16", None, "auto", "float32") == "bfloat16"
    assert least_precise("bfloat16", "fp8_per_channel", "auto", "bfloat16") == "fp8_weights"
    assert least_precise("bfloat16", "fp8_per_channel", "fp8", "bfloat16") == "fp8_kv_cache"
