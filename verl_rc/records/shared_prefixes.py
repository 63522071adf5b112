"""Prefixes that rows have in common, found by their tokens: a model computes them once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from verl_rc.records.batches import TokenBatch

Column = np.ndarray[Any, Any]

LEAST_SAVED = 0.1
"""Share of a row that must be computed anyway for the row not to compute it."""
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

    lengths: list[int]
    """Tokens of each row, by its number."""

    @classmethod
    def found(cls, rows: Sequence[Column]) -> "SharedPrefixes":
        """The prefixes of rows: arrays whose first axis are tokens, of one type. Equal entries make equal
        tokens."""
        # Sorted by bytes, rows that begin alike lie side by side.
        order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
        common = [0, *(_num_equal(rows[a], rows[b]) for a, b in pairwise(order))]
        return cls.worthwhile(order, common, [len(row) for row in rows])

    @classmethod
    def worthwhile(cls, order: list[int], common: Iterable[int], lengths: list[int]) -> "SharedPrefixes":
        """Of the tokens that each row of ``order`` has in ``common`` with the one before it those that are
        worth it."""
        shared = [
            tokens if tokens >= LEAST_SAVED * lengths[row] else 0
            for row, tokens in zip(order, common, strict=True)
        ]
        return cls(order, shared, lengths)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(self.shared)

    def of(self, rows: Sequence[int]) -> "SharedPrefixes":
        """The prefixes of some of the rows, which are numbered by their place in ``rows``."""
        place = {row: index for index, row in enumerate(rows)}
        order, commons, common = list[int](), list[int](), 0
        for row, with_previous in zip(self.order, self.shared, strict=True):
            common = min(common, with_previous)
            if row in place:
                order.append(place[row])
                commons.append(common)
                common = _ANY
        return SharedPrefixes.worthwhile(order, commons, [self.lengths[row] for row in rows])

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


def token_entries(ids: Column, experts: Column | None = None) -> Column:
    """uint8 ``[L, bytes]``, equal for tokens that are computed alike: their ids, and what ``experts`` (uint8
    ``[L, X]``) says of theirs."""
    entries = np.ascontiguousarray(ids, np.int32).view(np.uint8).reshape(len(ids), 4)
    return entries if experts is None else np.hstack([entries, experts])


def prefixes_of_rows(tokens: TokenBatch) -> SharedPrefixes:
    """The prefixes of prompts and responses, up to the first restart of each row. Rows with recorded experts
    share none, because nothing says here whether theirs are equal."""
    if tokens.experts_counts is not None:
        lengths = tokens.sequence_lengths.tolist()
        return SharedPrefixes(list(range(len(lengths))), [0] * len(lengths), lengths)
    restarts = None if tokens.restarts is None else tokens.restarts.numpy()
    prompts, responses = tokens.prompts.numpy(), tokens.responses.numpy()
    rows = list[Column]()
    for row, (prompt, response) in enumerate(
        zip(tokens.prompt_lengths.tolist(), tokens.response_lengths.tolist(), strict=True)
    ):
        if restarts is not None and restarts[row, :response].any():
            response = int(restarts[row].argmax())
        ids = np.concatenate([prompts[row, len(prompts[row]) - prompt :], responses[row, :response]])
        rows.append(token_entries(ids))
    return SharedPrefixes.found(rows)


def _num_equal(first: Column, second: Column) -> int:
    """Tokens at the beginning of both rows that are equal."""
    shorter = min(len(first), len(second))
    differ = (first[:shorter] != second[:shorter]).reshape(shorter, -1).any(axis=-1)
    return int(differ.argmax()) if differ.any() else shorter
