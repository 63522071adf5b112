"""Masked sums and whitening against plain Python, with NaN where the mask is False."""

import math
import statistics

import pytest
import torch

from verl_rc.tensor_ops import masked_row_sums, masked_sum, masked_whiten

NAN = math.nan
VALUES = torch.tensor([[1.0, 2.0, NAN], [4.0, NAN, NAN], [NAN, math.inf, -math.inf]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]]).bool()


def test_sums_never_see_masked_values() -> None:
    assert masked_sum(VALUES, MASK) == 7.0
    assert masked_row_sums(VALUES, MASK).tolist() == [3.0, 4.0, 0.0]
    assert masked_sum(VALUES, torch.zeros_like(MASK)) == 0.0


def test_gradient_is_cut_not_multiplied_by_zero() -> None:
    values = torch.tensor([[2.0, NAN]], requires_grad=True)
    masked_sum(values, torch.tensor([[True, False]])).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 0.0]]


def test_whitening_has_mean_zero_and_sample_variance_one() -> None:
    whitened = masked_whiten(VALUES, MASK)
    numbers = [1.0, 2.0, 4.0]
    mean, std = statistics.mean(numbers), statistics.stdev(numbers)
    expected = [(number - mean) / std for number in numbers]
    assert whitened[MASK].tolist() == pytest.approx(expected, rel=1e-6)
    assert whitened[~MASK].eq(0).all()


@pytest.mark.parametrize("count", [0, 1])
def test_whitening_too_few_values_only_centres(count: int) -> None:
    mask = torch.zeros_like(MASK)
    mask[0, :count] = True
    assert masked_whiten(VALUES, mask).eq(0).all()
