"""Averages of token losses, and reported means that add up."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.algorithm.losses import AGGREGATION_MODES, Aggregation, aggregate_loss, token_mean
from verl_rc.metrics.mergeable import Mean

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "loss_aggregation.json").read_text())["cases"]


def float64(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['loss_agg_mode']}-{case['kwargs']}")
def test_equals_golden_after_the_factor_for_averaged_gradients(case: dict[str, Any]) -> None:
    given_counts = case["kwargs"]
    loss = aggregate_loss(
        float64(case["loss"]),
        float64(case["mask"]),
        case["loss_agg_mode"],
        num_tokens=given_counts.get("batch_num_tokens"),
        num_sequences=given_counts.get("global_batch_size"),
        loss_scale_factor=given_counts.get("loss_scale_factor"),
    )
    assert (given_counts.get("dp_size", 1) * loss).item() == pytest.approx(case["expected"], rel=1e-6)


LOSSES = [[1.0, 2.0, 4.0, 100.0], [3.0, 100.0, 100.0, 5.0], [100.0, 100.0, 100.0, 100.0]]
MASK = [[1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 0, 0]]
KEPT = [[1, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 15 / 5),
        ("token-sum", 15.0),
        ("seq-mean-token-sum", 15 / 2),
        ("seq-mean-token-mean", (7 / 3 + 8 / 2) / 2),
        ("seq-mean-token-sum-norm", 15 / 2 / 4),
    ],
)
def test_counts_tokens_and_nonempty_rows_when_no_counts_are_given(mode: str, expected: float) -> None:
    assert Aggregation(mode).reduce(float64(LOSSES), float64(MASK)).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "original", "kept"),
    [
        ("token-mean", 5 / 5, 5 / 2),
        ("token-sum", 5.0, 5.0),
        ("seq-mean-token-sum", 5 / 2, 5 / 1),
        ("seq-mean-token-mean", 5 / 3 / 2, 5 / 2 / 1),
        ("seq-mean-token-sum-norm", 5 / 2 / 4, 5 / 1 / 4),
    ],
)
def test_denominator_mask_decides_whether_rejected_tokens_are_counted(
    mode: str, original: float, kept: float
) -> None:
    losses, kept_mask = float64(LOSSES), float64(KEPT)
    assert Aggregation(mode).reduce(losses, kept_mask, float64(MASK)).item() == pytest.approx(original)
    assert Aggregation(mode).reduce(losses, kept_mask).item() == pytest.approx(kept)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nothing_kept_gives_zero_attached_to_the_graph(mode: str) -> None:
    losses = torch.full((2, 3), torch.nan, requires_grad=True)
    for counts in ({}, {"num_tokens": 0, "num_sequences": 0}, {"num_tokens": torch.tensor(0.0)}):
        loss = Aggregation(mode, **counts).reduce(losses, torch.zeros(2, 3))
        (gradient,) = torch.autograd.grad(loss, losses)
        assert loss.item() == 0
        assert torch.equal(gradient, torch.zeros(2, 3))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_nan_outside_the_mask_is_harmless(mode: str) -> None:
    mask = float64(MASK)
    poisoned = float64(LOSSES).where(mask.bool(), torch.nan)
    found, expected = (Aggregation(mode).reduce(losses, mask) for losses in (poisoned, float64(LOSSES)))
    assert found.item() == expected.item()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 999), st.sampled_from(AGGREGATION_MODES), st.integers(1, 5), st.integers(0, 3))
def test_parts_with_shared_denominators_add_up_to_the_whole(
    seed: int, mode: str, split: int, pad: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(6, 5, generator=generator, dtype=torch.float64)
    counted = torch.rand(6, 5, generator=generator) < 0.7
    mask = counted & (torch.rand(6, 5, generator=generator) < 0.7)
    aggregation = Aggregation(mode, counted.sum(), counted.any(-1).sum(), loss_scale_factor=5)
    whole = aggregation.reduce(losses, mask, counted)

    def pad_right(values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, pad))

    order = torch.randperm(6, generator=generator)
    parts = [
        aggregation.reduce(pad_right(losses[rows]), pad_right(mask[rows]), pad_right(counted[rows]))
        for rows in (order[:split], order[split:])
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-12)


def test_low_precision_losses_are_summed_in_float32() -> None:
    losses = torch.ones(7, 43, dtype=torch.bfloat16)
    assert Aggregation("token-sum").reduce(losses, torch.ones(7, 43)).item() == 301


def test_refuses_unknown_modes_and_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"loss_agg_mode\) must be one of token-mean, .*got 'mean'"):
        Aggregation("mean")
    with pytest.raises(ValueError, match=r"of one shape; got \(1, 2\), \(1, 3\)"):
        Aggregation("token-mean").reduce(torch.zeros(1, 2), torch.ones(1, 3))


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
def test_runs_without_reading_tensors_on_the_host(mode: str) -> None:
    with FakeTensorMode():
        loss = Aggregation(mode, num_tokens=torch.ones(())).reduce(torch.zeros(2, 3), torch.ones(2, 3))
    assert loss.shape == ()


def test_parts_of_unequal_size_add_up_to_the_mean_over_all_tokens() -> None:
    first = token_mean(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, True, True]]))
    second = token_mean(torch.tensor([[10.0, torch.nan]]), torch.tensor([[True, False]]))
    assert (first + second).value.item() == 16 / 4


def test_booleans_are_counted_and_nothing_counted_means_zero() -> None:
    clipped = torch.tensor([[True, False, True]])
    assert token_mean(clipped, torch.tensor([[True, True, False]])).value.item() == 0.5
    assert token_mean(clipped, torch.zeros(1, 3, dtype=torch.bool)).value.item() == 0


def test_low_precision_is_summed_without_loss() -> None:
    metric = token_mean(torch.ones(7, 43, dtype=torch.bfloat16), torch.ones(7, 43, dtype=torch.bool))
    assert metric.total.item() == metric.count.item() == 301
    assert metric.total.dtype == metric.count.dtype == torch.float64


def test_metrics_carry_no_graph() -> None:
    metric = token_mean(torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, dtype=torch.bool))
    assert isinstance(metric, Mean)
    assert not metric.total.requires_grad
    assert not metric.count.requires_grad
