"""Prefixes that rows have in common, found by their tokens: a model computes them once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Column = np.ndarray[Any, Any]

LEAST_SAVED = 0.1
"""Share of a row, and of a micro-batch, from which what others compute anyway is worth another layout."""
_ANY = 1 << 62
"""More tokens than a row has."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Rows in an order in which those with a common prefix lie side by side.

    Any two of them share at least the smallest number of ``shared`` between them.
    """

    order: list[int]
    """Row numbers."""
    shared: list[int]
    """Tokens that each row of ``order`` has in common with the one before it, from the first token on; 0
    where they are less than ``LEAST_SAVED`` of it."""

    @classmethod
    def found(cls, rows: Sequence[Column]) -> "SharedPrefixes":
        """The prefixes of rows: arrays whose first axis are tokens, of one type. Equal entries make equal
        tokens."""
        # Sorted by bytes, rows that begin alike lie side by side.
        order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
        common = [0, *(_num_equal(rows[a], rows[b]) for a, b in pairwise(order))]
        lengths = [len(rows[row]) for row in order]
        shared = [n if n >= LEAST_SAVED * length else 0 for n, length in zip(common, lengths, strict=True)]
        return cls(order, shared)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(self.shared)

    def of(self, rows: Sequence[int]) -> "SharedPrefixes":
        """The prefixes of some of the rows, which are numbered by their place in ``rows``."""
        place = {row: index for index, row in enumerate(rows)}
        order, shared, common = list[int](), list[int](), 0
        for row, with_previous in zip(self.order, self.shared, strict=True):
            common = min(common, with_previous)
            if row in place:
                order.append(place[row])
                shared.append(common)
                common = _ANY
        return SharedPrefixes(order, shared)

    def families(self) -> list["Family"]:
        """Rows that share a prefix, family by family; a row that shares none is a family of its own."""
        families: list[Family] = []
        for row, common in zip(self.order, self.shared, strict=True):
            if not common:
                families.append([])
            families[-1].append((row, common))
        return families


Family = list[tuple[int, int]]
"""Rows that share a prefix, each with the number of tokens that it shares with the one before it."""


def _num_equal(first: Column, second: Column) -> int:
    """Tokens at the beginning of both rows that are equal."""
    shorter = min(len(first), len(second))
    differ = (first[:shorter] != second[:shorter]).reshape(shorter, -1).any(axis=-1)
    return int(differ.argmax()) if differ.any() else shorter
