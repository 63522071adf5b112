"""Chunks cover every row once, in order, and there is always one."""

import pytest
import torch

from verl_rc.correction.chunks import CHUNK_TOKENS, row_chunks


@pytest.mark.parametrize(
    ("rows", "width", "sizes"), [(5, 4, [2, 2, 1]), (3, 100, [1, 1, 1]), (4, 1, [4]), (0, 4, [0]), (3, 0, [3])]
)
def test_sizes(rows: int, width: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHUNK_TOKENS, "cpu", 9)
    given = torch.arange(rows)[:, None].expand(rows, width)
    chunks = list(row_chunks(given))
    assert [len(range(rows)[chunk]) for chunk in chunks] == sizes
    assert [row for chunk in chunks for row in range(rows)[chunk]] == list(range(rows))
