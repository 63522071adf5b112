"""Rows a few at a time and no further than their responses reach, so that temporaries stay small and padding costs nothing."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_POSITIONS_ON_CPU = 65_536
"""Two threads share the work (PyTorch asks a second one for more than 32,768 elements), and temporaries stay near the cache: a
position takes up to 65 bytes of them."""
_POSITIONS_ON_A_DEVICE = 1 << 20


@dataclass(frozen=True)
class RowChunk:
    """Some rows, as far as their longest response reaches."""

    rows: slice | Tensor
    """Which: consecutive ones, or int64 ``[b]``."""
    width: int
    """Positions that are looked at; none of the rows has a response token behind them."""

    def of(self, values: Tensor) -> Tensor:
        """These rows of ``[B]``, or of ``[B, T]`` these rows and positions."""
        cropped = values if values.ndim == 1 else values[:, : self.width]
        return cropped[self.rows] if isinstance(self.rows, slice) else cropped.index_select(0, self.rows)

    def write(self, values: Tensor, target: Tensor) -> None:
        """Put what was computed for these rows and positions where it belongs in ``target`` ``[B, T]``."""
        cropped = target[:, : self.width]
        if isinstance(self.rows, slice):
            cropped[self.rows] = values
        else:
            cropped.index_copy_(0, self.rows, values)


@dataclass(frozen=True)
class RowChunks:
    """All rows in chunks."""

    chunks: list[RowChunk]
    """Every row is in one of them."""
    places: Tensor | None
    """int64 ``[B]``: where each row stands when the chunks are put in a line; None: in their own order."""

    @classmethod
    def of(cls, response_mask: Tensor) -> "RowChunks":
        """Chunks for a mask ``[B, T]``, at least one; rows of like length together where the host can read their lengths."""
        rows, width = response_mask.shape
        positions = chunk_positions(response_mask.device)
        if not (rows and width and is_on_host(response_mask)):
            return cls([RowChunk(some, width) for some in _slices(rows, width, positions)], None)
        lengths, order = _reach(response_mask, positions).sort()
        reach, end = lengths.tolist(), rows
        chunks: list[RowChunk] = []
        line: list[Tensor] = []
        while end > 0:
            longest = max(reach[end - 1], 1)
            start = max(end - max(positions // longest, 1), 0)
            line.append(order[start:end])
            chunks.append(RowChunk(line[-1], longest))
            end = start
        return cls(chunks, torch.cat(line).argsort())

    def __iter__(self) -> Iterator[RowChunk]:
        return iter(self.chunks)

    def join(self, parts: list[Tensor]) -> Tensor:
        """``[..., B]`` in the rows' own order, from what was computed for each chunk."""
        joined = torch.cat(parts, dim=-1)
        return joined if self.places is None else joined.index_select(-1, self.places)


def chunk_positions(device: torch.device) -> int:
    """How many positions a chunk has at most, unless a single row has more."""
    return _POSITIONS_ON_CPU if device.type == "cpu" else _POSITIONS_ON_A_DEVICE


def is_on_host(values: Tensor) -> bool:
    """Whether reading the numbers costs nothing: a plain tensor in the memory of the CPU, not one of ``FakeTensorMode``."""
    return type(values) is Tensor and values.device.type == "cpu"


def _slices(rows: int, width: int, positions: int) -> Iterator[slice]:
    step = max(1, positions // max(width, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))


def _reach(response_mask: Tensor, positions: int) -> Tensor:
    """How many positions of each row there are up to its last response token, or up to 7 more, int32 ``[B]``."""
    rows, width = response_mask.shape
    mask, step = response_mask.bool(), 1
    if width % 8 == 0 and mask.is_contiguous():
        mask, step = mask.view(torch.int64), 8  # eight at a time: a word is 0 when none of its bytes is 1
    numbers = torch.arange(step, width + 1, step, dtype=torch.int32)
    parts = [mask[some].bool().to(torch.int32).mul_(numbers).amax(dim=-1) for some in _slices(rows, len(numbers), positions)]
    return torch.cat(parts)
