"""Rows in blocks."""

import pytest
import torch

from verl_rc.tensor_ops import in_row_blocks, row_slices


@pytest.mark.parametrize(
    ("num_rows", "width", "elements", "expected"),
    [
        (5, 3, 6, [(0, 2), (2, 4), (4, 5)]),
        (2, 10, 6, [(0, 1), (1, 2)]),  # a row has more elements than a block
        (3, 0, 6, [(0, 3)]),
        (0, 3, 6, [(0, 0)]),
    ],
)
def test_slices_cover_the_rows_once(num_rows: int, width: int, elements: int, expected: list[tuple[int, int]]) -> None:
    assert [(rows.start, rows.stop) for rows in row_slices(num_rows, width, elements)] == expected


def test_blocks_are_put_together_in_order() -> None:
    rows = torch.arange(50_000, dtype=torch.float64).view(-1, 2)
    seen: list[int] = []

    def difference(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        seen.append(len(first))
        return first - 2 * second

    assert torch.equal(in_row_blocks(difference, rows, rows), -rows)
    assert len(seen) == 1
    wide = rows.view(50, 1000).repeat(40, 1)
    assert torch.equal(in_row_blocks(difference, wide, wide), -wide)
    assert len(seen) > 10
