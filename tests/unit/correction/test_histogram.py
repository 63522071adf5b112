"""Percentiles of log-ratios: bounded relative error, mergeable, any size."""

import math

import pytest
import torch

from verl_rc.correction.histogram import log_ratio_histogram, percentiles
from verl_rc.metrics.log_ratio_bins import BINS_PER_SIDE, HISTOGRAM_EDGES, LARGEST, NUM_BINS, SMALLEST


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
    assert percentiles(torch.zeros_like(counts).tolist(), [50]) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_value_is_in_the_bin_that_a_search_among_the_edges_finds(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = torch.cat(
        [torch.randn(2000, generator=generator) * scale for scale in (1e-7, 1e-4, 0.1, 1.0, 10.0)]
    )
    edges = torch.tensor([0.0, 1e9, LARGEST, *(2.0**power for power in range(-26, 5))])
    values = torch.cat([sizes, edges, -edges]).to(dtype)
    above = torch.tensor(HISTOGRAM_EDGES[BINS_PER_SIDE + 1 :], dtype=torch.float64)
    steps = torch.searchsorted(above, values.double().abs().clamp_max(LARGEST), right=True).clamp_max(
        BINS_PER_SIDE
    )
    expected = torch.bincount(BINS_PER_SIDE + (steps * values.sign()).long(), minlength=NUM_BINS)
    assert log_ratio_histogram(values, torch.ones_like(values)).tolist() == expected.tolist()
