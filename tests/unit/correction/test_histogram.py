"""Percentiles of log-ratios: bounded relative error, mergeable, any size."""

import math

import pytest
import torch

from verl_rc.correction.histogram import LARGEST, SMALLEST, log_ratio_histogram, percentiles


@pytest.mark.parametrize("value", [1e-7, -3e-3, 0.2, -1.7, 19.0])
def test_a_single_value_comes_back_within_four_percent(value: float) -> None:
    counts = log_ratio_histogram(torch.tensor([value]), torch.tensor([True]))
    assert percentiles(counts.tolist(), [50])[50] == pytest.approx(value, rel=0.04)


def test_zero_is_exact_and_extremes_are_cut() -> None:
    values = torch.tensor([0.0, SMALLEST / 10, 1e6])
    counts = log_ratio_histogram(values, torch.ones(3, dtype=torch.bool)).tolist()
    assert percentiles(counts, [50])[50] == 0.0
    assert percentiles(counts, [100])[100] == pytest.approx(LARGEST, rel=0.04)


def test_percentiles_of_many_values_against_sorting() -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.3
    counts = log_ratio_histogram(values, torch.ones(5000, dtype=torch.bool)).tolist()
    for percent in (1, 25, 75, 99):
        exact = float(values.sort().values[math.ceil(percent / 100 * 5000) - 1])
        assert percentiles(counts, [percent])[percent] == pytest.approx(exact, rel=0.05)


def test_masked_values_are_not_counted() -> None:
    counts = log_ratio_histogram(torch.tensor([0.1, 0.0]), torch.tensor([True, False]))
    assert counts.sum() == 1
    assert math.isnan(percentiles(torch.zeros_like(counts).tolist(), [50])[50])
