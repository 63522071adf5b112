"""The value loss and explained variance."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.algorithm.losses import Aggregation, compute_value_loss, explained_variance

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "value_loss.json").read_text())["cases"]


@pytest.mark.parametrize(
    "case", GOLDEN, ids=lambda case: f"{case['loss_agg_mode']}-{case['cliprange_value']}"
)
def test_loss_gradient_and_clip_share_equal_golden(case: dict[str, Any]) -> None:
    def tensor(name: str) -> torch.Tensor:
        return torch.tensor(case[name], dtype=torch.float64)

    mask = tensor("mask").bool()
    values = tensor("vpreds").masked_fill(~mask, torch.nan).requires_grad_()
    loss, metrics = compute_value_loss(
        values,
        tensor("values").masked_fill(~mask, torch.nan),
        tensor("returns").masked_fill(~mask, torch.nan),
        tensor("mask"),
        case["cliprange_value"],
        case["loss_agg_mode"],
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["expected"]["loss"], rel=1e-5)
    assert metrics["critic/vf_clipfrac"].value.item() == pytest.approx(case["expected"]["clipfrac"], rel=1e-5)
    assert metrics["critic/vpred_mean"].value.item() == pytest.approx(tensor("vpreds")[mask].mean().item())
    torch.testing.assert_close(
        values.grad, torch.tensor(case["expected"]["grad"], dtype=torch.float64), rtol=1e-5, atol=1e-7
    )


def test_micro_batches_add_up_with_shared_denominators() -> None:
    values, old_values, returns = torch.randn(
        3, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    mask = torch.rand(4, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    for mode in ("token-mean", "seq-mean-token-mean"):
        aggregation = Aggregation(mode, mask.sum(), mask.any(-1).sum())
        whole = compute_value_loss(values, old_values, returns, mask, 0.3, aggregation)[0]
        parts = [
            compute_value_loss(values[rows], old_values[rows], returns[rows], mask[rows], 0.3, aggregation)[0]
            for rows in (slice(0, 1), slice(1, 4))
        ]
        assert sum(parts).item() == pytest.approx(whole.item())


def test_explained_variance_equals_a_direct_computation() -> None:
    generator = torch.Generator().manual_seed(2)
    returns = 100 + torch.randn(5, 6, generator=generator)
    values = returns + 0.5 * torch.randn(5, 6, generator=generator)
    mask = torch.rand(5, 6, generator=generator) < 0.7
    selected_returns, selected_values = returns[mask].double(), values[mask].double()
    expected = 1 - (selected_returns - selected_values).var() / (selected_returns.var() + 1e-5)
    values = values.masked_fill(~mask, torch.nan)
    assert explained_variance(values, returns, mask).item() == pytest.approx(expected.item(), rel=1e-9)


def test_explained_variance_is_one_for_perfect_values_and_zero_for_the_mean() -> None:
    returns = torch.tensor([[0.0, 1000.0, 2000.0]])
    mask = torch.ones(1, 3)
    assert explained_variance(returns, returns, mask).item() == 1
    assert explained_variance(torch.full((1, 3), 7.0), returns, mask).item() == pytest.approx(0, abs=1e-9)
    assert explained_variance(returns, returns, torch.zeros(1, 3)).item() == 1


def test_refuses_bad_clip_ranges_and_shapes() -> None:
    ones = torch.ones(1, 2)
    with pytest.raises(ValueError, match=r"critic\.cliprange_value must be > 0 .*got 0"):
        compute_value_loss(ones, ones, ones, ones, 0)
    with pytest.raises(ValueError, match=r"mask is \(1, 2\), .*'returns': \(1, 3\)"):
        compute_value_loss(ones, ones, torch.ones(1, 3), ones, 0.5)


def test_runs_without_reading_tensors_on_the_host() -> None:
    with FakeTensorMode():
        ones = torch.ones(2, 3)
        compute_value_loss(ones, ones, ones, ones, 0.5)
        explained_variance(ones, ones, ones)
