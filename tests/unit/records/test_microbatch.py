"""Micro-batches: every row once, limits kept, the same number on every rank, near level in tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.records.microbatch import MicroBatchLimit, assign_rows, balanced_partition

LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_rows=st.integers(1, 9))
def test_rows_limit_covers_every_row_once_with_equal_counts(
    lengths: list[int], ranks: int, max_rows: int
) -> None:
    assigned = assign_rows(lengths, ranks, MicroBatchLimit(max_rows=max_rows))
    rows = sorted(row for rank in assigned for batch in rank for row in batch)
    assert rows == list(range(len(lengths)))
    assert len({len(rank) for rank in assigned}) == 1
    assert max(len(batch) for rank in assigned for batch in rank) <= max_rows


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_tokens=st.integers(10, 100))
def test_token_limit_is_kept_unless_one_row_is_longer(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    assigned = assign_rows(lengths, ranks, MicroBatchLimit(max_tokens=max_tokens))
    assert sorted(row for rank in assigned for batch in rank for row in batch) == list(range(len(lengths)))
    for rank in assigned:
        for batch in rank:
            assert sum(lengths[row] for row in batch) <= max_tokens or len(batch) == 1


def test_best_fit_fills_two_micro_batches() -> None:
    assert assign_rows([6, 5, 4, 3, 2], 1, MicroBatchLimit(max_tokens=10)) == [[[0, 2], [1, 3, 4]]]


def test_a_rank_without_rows_still_gets_its_micro_batches() -> None:
    assert assign_rows([5], 2, MicroBatchLimit(max_rows=1)) == [[[0]], [[]]]


def test_exactly_one_limit() -> None:
    with pytest.raises(ValueError, match="rows or by tokens"):
        MicroBatchLimit()
    with pytest.raises(ValueError, match="rows or by tokens"):
        MicroBatchLimit(max_rows=1, max_tokens=1)


@given(lengths=st.lists(st.integers(1, 1000), max_size=60), parts=st.integers(1, 5))
def test_every_row_once_and_rows_level(lengths: list[int], parts: int) -> None:
    split = balanced_partition(lengths, parts)
    assert sorted(row for part in split for row in part) == list(range(len(lengths)))
    assert max(map(len, split)) <= -(-len(lengths) // parts)


def test_tokens_are_level_for_a_known_case() -> None:
    split = balanced_partition([9, 1, 8, 2, 7, 3], 2)
    assert sorted(sum([9, 1, 8, 2, 7, 3][row] for row in part) for part in split) == [14, 16]
