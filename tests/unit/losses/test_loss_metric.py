"""Metrics as sums: exact reduction over parts."""

import torch

from verl_rc.losses import LossMetric, token_metric


def test_parts_of_unequal_size_add_up_to_the_mean_over_all_tokens() -> None:
    first = token_metric(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[True, True, True]]))
    second = token_metric(torch.tensor([[10.0, torch.nan]]), torch.tensor([[True, False]]))
    assert (first + second).mean().item() == 16 / 4


def test_booleans_are_counted_and_nothing_counted_means_zero() -> None:
    clipped = torch.tensor([[True, False, True]])
    assert token_metric(clipped, torch.tensor([[True, True, False]])).mean().item() == 0.5
    assert token_metric(clipped, torch.zeros(1, 3, dtype=torch.bool)).mean().item() == 0


def test_low_precision_is_summed_without_loss() -> None:
    metric = token_metric(torch.ones(7, 43, dtype=torch.bfloat16), torch.ones(7, 43, dtype=torch.bool))
    assert metric.numerator.item() == metric.denominator.item() == 301
    assert metric.numerator.dtype == metric.denominator.dtype == torch.float64


def test_metrics_carry_no_graph() -> None:
    metric = token_metric(torch.ones(1, 2, requires_grad=True), torch.ones(1, 2, dtype=torch.bool))
    assert isinstance(metric, LossMetric)
    assert not metric.numerator.requires_grad
    assert not metric.denominator.requires_grad
