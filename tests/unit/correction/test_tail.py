"""The tail's shape against distributions of which it is known, and against the fit on exact values."""

import math
import random

import pytest
import torch

from verl_rc.correction.histogram import NUM_BINS, log_ratio_histogram
from verl_rc.correction.tail import pareto_k


def counts_of(log_ratios: list[float]) -> list[float]:
    values = torch.tensor(log_ratios, dtype=torch.float64)
    counts: list[float] = log_ratio_histogram(values, torch.ones_like(values, dtype=torch.bool)).tolist()
    return counts


def shape_from_exact_values(weights: list[float]) -> float:
    """Zhang and Stephens on the sorted weights themselves, as the paper writes it, then the prior of ten draws."""
    tail_length = math.ceil(min(len(weights) / 5, 3 * math.sqrt(len(weights))))
    ordered = sorted(weights)
    bound = ordered[-tail_length - 1]
    x = [weight - bound for weight in ordered[-tail_length:]]
    n, m = len(x), 30 + int(math.sqrt(len(x)))
    theta = [1 / x[-1] + (1 - math.sqrt(m / (j - 0.5))) / (3 * x[int(n / 4 + 0.5) - 1]) for j in range(1, m + 1)]
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
    "logs", [[], [0.1], [0.3] * 1000, [0.1 * i for i in range(8)], [0.0] * 50], ids=["none", "one", "equal", "few", "zeros"]
)
def test_no_tail_no_shape(logs: list[float]) -> None:
    assert pareto_k(counts_of(logs) if logs else [0.0] * NUM_BINS) is None
