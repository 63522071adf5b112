"""Masked sums and whitening against plain Python, with NaN where the mask is False; rows in blocks; groups by
ids."""

import math
import statistics

import pytest
import torch

from verl_rc.tensor_ops import (
    gathered_rows,
    is_rounding,
    masked_row_sums,
    masked_sum,
    masked_whiten,
    row_slices,
)
from verl_rc.tensor_ops.masked import group_numbers

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


def steps_above(value: float, count: int) -> float:
    """The number ``count`` float32 steps above ``value``."""
    number = torch.tensor(value)
    for _ in range(count):
        number = number.nextafter(torch.tensor(math.inf))
    return number.item()


@pytest.mark.parametrize("value", [0.7, -100.3, 1000.3, 12345.6, 3e-7, 2e30])
@pytest.mark.parametrize("rows", [1, 64])
def test_equal_values_of_any_size_are_whitened_to_zero(value: float, rows: int) -> None:
    mask = torch.arange(1000) < torch.randint(2, 1001, (rows, 1), generator=torch.Generator().manual_seed(0))
    assert masked_whiten(torch.full(mask.shape, value), mask).eq(0).all()


@pytest.mark.parametrize("value", [0.7, -100.3, 12345.6])
def test_values_a_step_apart_are_whitened_to_zero_and_a_hundred_steps_apart_to_their_signs(
    value: float,
) -> None:
    mask = torch.ones(2, 50).bool()
    near = torch.tensor([value, steps_above(value, 1)]).unsqueeze(1).expand(2, 50)
    assert masked_whiten(near, mask).eq(0).all()
    far = torch.tensor([value, steps_above(value, 100)]).unsqueeze(1).expand(2, 50)
    # two values, as often each: ±1 with n in the variance, times √((n − 1) / n) for n − 1, and 1e-8 beside it
    variance = (steps_above(value, 100) - torch.tensor(value).item()) ** 2 / 4 * 100 / 99
    expected = math.sqrt(variance * 99 / 100 / (variance + 1e-8))
    assert masked_whiten(far, mask)[:, 0].tolist() == pytest.approx([-expected, expected], rel=1e-5)


def test_nothing_is_whitened_to_nothing() -> None:
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3).bool()).shape == (0, 3)


def test_differences_of_large_numbers_are_measured_by_the_size_of_those() -> None:
    values, mask = torch.tensor([[0.0, 6e-5, 0.0]]), torch.ones(1, 3).bool()
    assert masked_whiten(values, mask, minuends=torch.full((1, 3), -1000.0)).eq(0).all()
    assert masked_whiten(values, mask).abs().max() > 0.3


def test_four_steps_of_float32_are_rounding() -> None:
    size = torch.tensor(1.0, dtype=torch.float64)
    assert is_rounding(size * 4 * 2.0**-23, size)
    assert not is_rounding(size * 5 * 2.0**-23, size)
    assert is_rounding(size * 0, size * 0)
    assert not is_rounding(size * math.inf, size * math.inf)


@pytest.mark.parametrize(
    ("num_rows", "width", "elements", "expected"),
    [
        (5, 3, 6, [(0, 2), (2, 4), (4, 5)]),
        (2, 10, 6, [(0, 1), (1, 2)]),  # a row has more elements than a block
        (3, 0, 6, [(0, 3)]),
        (0, 3, 6, [(0, 0)]),
    ],
)
def test_slices_cover_the_rows_once(
    num_rows: int, width: int, elements: int, expected: list[tuple[int, int]]
) -> None:
    assert [(rows.start, rows.stop) for rows in row_slices(num_rows, width, elements)] == expected


def test_groups_by_any_id() -> None:
    assert group_numbers(["b", "a", "b"], torch.device("cpu")).tolist() == [0, 1, 0]
    slots = group_numbers(torch.tensor([7, 3, 7, 9]), torch.device("cpu"))
    assert slots[0] == slots[2]
    assert len(set(slots.tolist())) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_row_that_is_gathered_often_are_not_lost(dtype: torch.dtype) -> None:
    """1,024 times 1 + 1/128, which bfloat16 knows but not beside 256."""
    values = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    index = torch.tensor([1, *[2] * 1024])
    rows = gathered_rows(values, index)
    assert torch.equal(rows, values[index])
    rows.backward(torch.full_like(rows, 1 + 1 / 128))
    assert values.grad is not None
    assert values.grad.tolist() == [[0.0] * 2, [1 + 1 / 128] * 2, [1032.0] * 2]
