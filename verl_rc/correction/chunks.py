"""Rows a few at a time, so that temporaries stay small."""

from collections.abc import Iterator

from torch import Tensor

CHUNK_TOKENS = {"cpu": 40_960}
"""Tokens of a chunk by kind of device: on a CPU its temporaries stay in the cache, and two threads share the work (PyTorch
takes a second one for more than 32,768 elements)."""
CHUNK_TOKENS_ELSEWHERE = 1 << 20


def row_chunks(like: Tensor) -> Iterator[slice]:
    """Slices of rows small enough that the temporaries of one chunk are few megabytes on a CPU (they stay in its cache)."""
    rows, width = like.shape
    tokens = CHUNK_TOKENS.get(like.device.type, CHUNK_TOKENS_ELSEWHERE)
    step = max(1, tokens // max(width, 1))
    for start in range(0, max(rows, 1), step):
        yield slice(start, min(start + step, rows))
