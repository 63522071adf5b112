"""Finding the prefixes that rows have in common, by their tokens."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from verl_rc.records.batches import TokenBatch
from verl_rc.records.microbatch import SharedPrefixes

Column = np.ndarray[Any, Any]


def find_prefixes(rows: Sequence[Column]) -> SharedPrefixes:
    """The prefixes of rows: arrays whose first axis are tokens, of one type. Equal entries make equal
    tokens."""
    # Sorted by bytes, rows that begin alike lie side by side.
    order = sorted(range(len(rows)), key=lambda row: rows[row].tobytes())
    common = [0, *(_num_equal(rows[a], rows[b]) for a, b in pairwise(order))]
    return SharedPrefixes.worthwhile(order, common, [len(row) for row in rows])


def token_entries(ids: Column, experts: Column | None = None, pictures: Column | None = None) -> Column:
    """uint8 ``[L, bytes]``, equal for tokens that are computed alike: their ids, what ``experts`` (uint8
    ``[L, X]``) says of theirs, and the ``pictures`` (int64 ``[L]``, numbers) of their rows."""
    beside = [] if experts is None else [experts]
    if pictures is not None:
        beside.append(np.ascontiguousarray(pictures).view(np.uint8).reshape(len(ids), 8))
    entries = np.ascontiguousarray(ids, np.int32).view(np.uint8).reshape(len(ids), 4)
    return np.hstack([entries, *beside]) if beside else entries


def prefixes_of_rows(tokens: TokenBatch, replays: bool) -> SharedPrefixes:
    """The prefixes of prompts and responses, up to the first restart of each row.

    ``replays``: the model takes recorded experts. Such rows share none, because nothing says here whether
    theirs are equal.
    """
    if replays and tokens.experts_counts is not None:
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
        numbers = None if tokens.pictures is None else np.full(len(ids), int(tokens.pictures[row]))
        rows.append(token_entries(ids, pictures=numbers))
    return find_prefixes(rows)


def _num_equal(first: Column, second: Column) -> int:
    """Tokens at the beginning of both rows that are equal."""
    shorter = min(len(first), len(second))
    if not shorter:
        return 0
    differ = (first[:shorter] != second[:shorter]).reshape(shorter, -1).any(axis=-1)
    return int(differ.argmax()) if differ.any() else shorter
