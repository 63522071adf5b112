"""Lists of integers beside sampled tokens, of different lengths: the tokens that a filter left, or
experts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RaggedColumn:
    """A list of integers for each of T tokens."""

    offsets: np.ndarray[Any, Any]
    """int64 ``[T + 1]``, from 0: the list of token t is ``values[offsets[t]:offsets[t + 1]]``."""
    values: np.ndarray[Any, Any]
    """``[offsets[T]]``, of any integer dtype."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` when the offsets do not fit the values."""
        offsets = self.offsets
        ends = offsets[[0, -1]].tolist() if len(offsets) else []
        if ends != [0, len(self.values)] or (np.diff(offsets) < 0).any():
            raise ValueError(
                f"offsets of a RaggedColumn must rise from 0 to its {len(self.values)} values, got "
                f"{offsets[:3].tolist()} to {offsets[-3:].tolist()}."
            )

    @classmethod
    def from_counts(cls, counts: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> "RaggedColumn":
        """The first ``counts[0]`` values belong to the first token, and so on."""
        return cls(np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]), values)

    @classmethod
    def joined(cls, columns: Sequence["RaggedColumn"]) -> "RaggedColumn":
        """The concatenation of at least one column."""
        return cls.from_counts(
            np.concatenate([column.counts for column in columns]),
            np.concatenate([column.values for column in columns]),
        )

    @classmethod
    def empty(cls, num_tokens: int) -> "RaggedColumn":
        """A column of empty lists."""
        return cls(np.zeros(num_tokens + 1, dtype=np.int64), np.zeros(0, dtype=np.uint8))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.offsets) - 1

    def __getitem__(self, tokens: slice) -> "RaggedColumn":
        """A copy of the column of a slice of tokens."""
        first, end, _ = tokens.indices(len(self))
        offsets = self.offsets[first : end + 1]
        return RaggedColumn(offsets - offsets[0], self.values[offsets[0] : offsets[-1]].copy())

    @property
    def counts(self) -> np.ndarray[Any, Any]:
        """int64 ``[T]``: integers of each token."""
        return np.diff(self.offsets)
