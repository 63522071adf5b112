"""Chunks hold every row once, as far as its response reaches, and there is always one."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from verl_rc.correction.chunks import RowChunks


@pytest.mark.parametrize(
    ("reach", "width", "sizes"),
    [
        ([4, 4, 4, 4, 4], 4, [(2, 4), (2, 4), (1, 4)]),
        ([9, 30, 100], 100, [(1, 100), (1, 30), (1, 9)]),
        ([1, 4, 2, 1, 0], 4, [(2, 4), (3, 1)]),
        ([0, 0], 4, [(2, 1)]),
        ([], 4, [(0, 4)]),
        ([0, 0, 0], 0, [(3, 0)]),
    ],
)
def test_sizes(reach: list[int], width: int, sizes: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_rc.correction.chunks.chunk_positions", lambda _: 9)
    mask = torch.zeros(len(reach), width, dtype=torch.bool)
    for row, last in enumerate(reach):
        mask[row, last // 2 : last] = True
    chunks = RowChunks.of(mask)
    numbered = torch.arange(len(reach) * width).view(len(reach), width)
    parts = [chunk.of(numbered) for chunk in chunks]
    assert [part.shape for part in parts] == sizes
    rows = [chunk.of(torch.arange(len(reach))) for chunk in chunks]
    assert chunks.join(rows).tolist() == list(range(len(reach)))
    copied = torch.zeros_like(numbered)
    for chunk, part in zip(chunks, parts, strict=True):
        chunk.write(part, copied)
    assert copied[mask].tolist() == numbered[mask].tolist()


def test_without_numbers_to_read_rows_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_rc.correction.chunks.chunk_positions", lambda _: 9)
    with FakeTensorMode():
        chunks = RowChunks.of(torch.zeros(5, 4, dtype=torch.bool))
    assert [chunk.rows for chunk in chunks] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert chunks.places is None
