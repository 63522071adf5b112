"""Finding the prefixes that rows have in common, by their tokens."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from verl_rc.records.batches import TokenBatch
from verl_rc.records.microbatch import SharedPrefixes
from verl_rc.records.ragged import Column, Ragged, rows_of


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


def prefixes_of_rows(tokens: Ragged[TokenBatch], replays: bool) -> SharedPrefixes:
    """The prefixes of prompts and responses, up to the first restart of each row.

    ``replays``: the model takes recorded experts. Such rows share none, because nothing says here whether
    theirs are equal.
    """
    if replays and tokens.experts_counts is not None:
        lengths = tokens.sequence_lengths.tolist()
        return SharedPrefixes(list(range(len(lengths))), [0] * len(lengths), lengths)
    prompts, responses = (
        rows_of(tokens.columns[name], tokens.lengths[symbols])
        for name, symbols in (("prompts", "BP"), ("responses", "BR"))
    )
    if tokens.restarts is not None:
        restarts = rows_of(tokens.columns["restarts"], tokens.lengths["BR"])
        responses = [
            ids[: begins.argmax()] if begins.any() else ids
            for ids, begins in zip(responses, restarts, strict=True)
        ]
    ids = [np.concatenate(row) for row in zip(prompts, responses, strict=True)]
    if (numbers := tokens.columns.get("pictures")) is None:
        return find_prefixes([token_entries(row) for row in ids])
    rows = [
        token_entries(row, pictures=np.full(len(row), number))
        for row, number in zip(ids, numbers, strict=True)
    ]
    return find_prefixes(rows)


def _num_equal(first: Column, second: Column) -> int:
    """Tokens at the beginning of both rows that are equal."""
    shorter = min(len(first), len(second))
    if not shorter:
        return 0
    differ = (first[:shorter] != second[:shorter]).reshape(shorter, -1).any(axis=-1)
    return int(differ.argmax()) if differ.any() else shorter
