"""What rounding leaves of an update, against loops over numbers and a kernel's own rounding."""

import pytest
import torch
from torch import Tensor

from verl_rc.runtime.weight_sync.survival import EngineRounding, UpdateSurvival

BF16 = EngineRounding(torch.bfloat16, None, frozenset())
FP8 = EngineRounding(torch.bfloat16, "fp8_per_channel", frozenset({"linear"}))


def found(
    before: dict[str, Tensor], after: dict[str, Tensor], rounding: EngineRounding = BF16
) -> list[float]:
    return UpdateSurvival(before.items()).sums(after.items(), rounding).tolist()


def test_bfloat16_by_hand() -> None:
    """Next to 1 its numbers are 1/128 apart: 3/512 goes to the next one, 1/512 to none; 0 has no next one."""
    before = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[0.0], [5.0]])}
    after = {"a": before["a"] + torch.tensor([3 / 512, 1 / 512]), "b": torch.tensor([[1 / 4], [5.0]])}
    dot = 4 / 512 * 3 / 512 + 1 / 16
    assert found(before, after) == [dot, (9 + 1) / 512**2 + 1 / 16, 2, 3]


def test_float32_loses_nothing_and_what_does_not_change_counts_as_nothing() -> None:
    before = {"a": torch.randn(50), "b": torch.randn(4, 4)}
    after = {"a": before["a"] + 1e-6 * torch.randn(50), "b": before["b"]}
    dot, norm, other, changed = found(before, after, EngineRounding(torch.float32, None, frozenset()))
    assert dot == norm > 0
    assert 0 < other == changed <= 50


def test_a_row_in_fp8_is_scaled_by_its_largest_number() -> None:
    """448 is the largest number of e4m3; between 32 and 64 its numbers are 4 apart."""
    weights = torch.tensor([[448.0, 33.0, -35.0], [4.48, 0.33, -0.35]])
    rows = FP8("linear", weights.bfloat16().float())
    assert rows[0].tolist() == [448.0, 32.0, -36.0]
    assert torch.allclose(rows[1], torch.tensor([4.48, 0.32, -0.36]), rtol=3e-3)
    assert torch.equal(FP8("norm", weights), weights.bfloat16().float())
    assert torch.equal(FP8("linear", torch.zeros(1, 4)), torch.zeros(1, 4))


@pytest.mark.parametrize("parts", [1, 3])
def test_parts_of_the_rows_add_up(parts: int) -> None:
    """Ranks hold rows; a row's scale is its own."""
    torch.manual_seed(0)
    before, update = 0.02 * torch.randn(7, 64), 1e-4 * torch.randn(7, 64)
    after = before + update
    rounding = EngineRounding(torch.bfloat16, "fp8_per_channel", frozenset({"linear"}))
    total = torch.zeros(4, dtype=torch.float64)
    for one, two in zip(before.tensor_split(parts), after.tensor_split(parts), strict=True):
        total += torch.tensor(found({"linear": one}, {"linear": two}, rounding), dtype=torch.float64)
    expected = [0.0] * 4
    for row in range(7):
        old, new = rounding("linear", before[row : row + 1])[0], rounding("linear", after[row : row + 1])[0]
        for place in range(64):
            moved = float(new[place]) - float(old[place])
            step = float(after[row, place]) - float(before[row, place])
            changes = (moved * step, step * step, float(moved != 0), float(step != 0))
            expected = [one + two for one, two in zip(expected, changes, strict=True)]
    assert total.tolist() == pytest.approx(expected, rel=1e-6)
    assert 0.1 < total[0] / total[1] < 10
