"""Percentiles of log-ratios: bounded relative error, mergeable, any size."""

import math
import random

import pytest
import torch

from verl_rc.correction.histogram import log_ratio_histogram, pareto_k, percentiles
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
    assert math.isnan(percentiles(torch.zeros_like(counts).tolist(), [50])[50])


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


def counts_of(log_ratios: list[float]) -> list[float]:
    values = torch.tensor(log_ratios, dtype=torch.float64)
    counts: list[float] = log_ratio_histogram(values, torch.ones_like(values, dtype=torch.bool)).tolist()
    return counts


def shape_from_exact_values(weights: list[float]) -> float:
    """Zhang and Stephens on the sorted weights themselves, as the paper writes it, then the prior of ten
    draws."""
    tail_length = math.ceil(min(len(weights) / 5, 3 * math.sqrt(len(weights))))
    ordered = sorted(weights)
    bound = ordered[-tail_length - 1]
    x = [weight - bound for weight in ordered[-tail_length:]]
    n, m = len(x), 30 + int(math.sqrt(len(x)))
    theta = [
        1 / x[-1] + (1 - math.sqrt(m / (j - 0.5))) / (3 * x[int(n / 4 + 0.5) - 1]) for j in range(1, m + 1)
    ]
    k = [sum(math.log(1 - t * value) for value in x) / n for t in theta]
    profile = [n * (math.log(-t / shape) - shape - 1) for t, shape in zip(theta, k, strict=True)]
    weight = [1 / sum(math.exp(other - one) for other in profile) for one in profile]
    mean = sum(w * t for w, t in zip(weight, theta, strict=True))
    return (sum(math.log(1 - mean * value) for value in x) + 5.0) / (n + 10)


@pytest.mark.parametrize("shape", [0.2, 0.5, 0.9])
def test_a_pareto_distribution_has_its_own_shape(shape: float) -> None:
    source = random.Random(1)
    logs = [shape * source.expovariate(1.0) for _ in range(200_000)]
    assert pareto_k(counts_of(logs)) == pytest.approx(shape, abs=0.06)


@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("number", [400, 20_000])
def test_a_histogram_knows_what_the_values_know(spread: float, number: int) -> None:
    source = random.Random(2)
    logs = [source.gauss(-spread * spread / 2, spread) for _ in range(number)]
    found = pareto_k(counts_of(logs))
    assert found == pytest.approx(shape_from_exact_values([math.exp(log) for log in logs]), abs=0.08)


def test_a_wider_gap_has_a_heavier_tail() -> None:
    source = random.Random(3)
    normal = [source.gauss(0, 1) for _ in range(5_000)]
    found = [pareto_k(counts_of([spread * x for x in normal])) for spread in (0.1, 0.5, 1.0, 2.0)]
    shapes = [shape for shape in found if shape is not None]
    assert len(shapes) == 4
    assert shapes == sorted(shapes)
    assert shapes[0] < 0.3  # log-normal: every moment exists


@pytest.mark.parametrize(
    "logs",
    [[], [0.1], [0.3] * 1000, [0.1 * i for i in range(8)], [0.0] * 50],
    ids=["none", "one", "equal", "few", "zeros"],
)
def test_no_tail_no_shape(logs: list[float]) -> None:
    assert pareto_k(counts_of(logs) if logs else [0.0] * NUM_BINS) is None


def test_rounding_of_float32_has_no_tail() -> None:
    source = random.Random(4)
    heavy = [source.choice([-1, 1]) * 1e-7 * math.exp(2 * source.expovariate(1.0)) for _ in range(5_000)]
    rounded = [max(-2e-5, min(2e-5, log)) for log in heavy]  # as engine and trainer in float32 differ
    assert pareto_k(counts_of(rounded)) is None
    assert pareto_k(counts_of([100 * log for log in rounded])) is not None
