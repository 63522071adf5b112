"""Micro-batches: every row once, limits kept, the same number on every rank, near level in tokens."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.records.microbatch import MicroBatchLimit, assign_rows, balanced_partition
from verl_rc.records.shared_prefixes import find_prefixes

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


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_rows=st.integers(1, 9))
def test_rows_that_are_not_balanced_keep_their_order_over_ranks(
    lengths: list[int], ranks: int, max_rows: int
) -> None:
    assigned = assign_rows(lengths, ranks, MicroBatchLimit(max_rows=max_rows), balanced=False)
    assert [row for rank in assigned for batch in rank for row in batch] == list(range(len(lengths)))
    counts = [sum(map(len, rank)) for rank in assigned]
    assert max(counts) - min(counts) <= 1
    assert len({len(rank) for rank in assigned}) == 1


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


GROUPS = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.integers(1, 20), min_size=1, max_size=6)),
    min_size=1,
    max_size=8,
)
"""Tokens of a prompt, and of each of its responses."""


def rows_of(groups: list[tuple[int, list[int]]]) -> list[np.ndarray]:
    responses = [(number, prompt, length) for number, (prompt, rows) in enumerate(groups) for length in rows]
    return [
        np.array([number] * prompt + [100 + row] * length)
        for row, (number, prompt, length) in enumerate(responses)
    ]


def num_computed(rows: list[np.ndarray], some: list[int]) -> int:
    """Tokens of a micro-batch by its own prefixes."""
    return sum(len(rows[row]) for row in some) - find_prefixes([rows[row] for row in some]).saved_tokens


@given(groups=GROUPS, ranks=st.integers(1, 4), max_tokens=st.integers(10, 100))
def test_the_token_limit_counts_a_shared_prefix_once(
    groups: list[tuple[int, list[int]]], ranks: int, max_tokens: int
) -> None:
    rows = rows_of(groups)
    prefixes, lengths = find_prefixes(rows), list(map(len, rows))
    assigned = assign_rows(lengths, ranks, MicroBatchLimit(max_tokens=max_tokens), prefixes)
    assert sorted(row for rank in assigned for batch in rank for row in batch) == list(range(len(rows)))
    assert len({len(rank) for rank in assigned}) == 1
    assert max(sum(map(len, rank)) for rank in assigned) <= -(-len(rows) // ranks)
    for rank in assigned:
        for batch in rank:
            assert len(batch) <= 1 or num_computed(rows, batch) <= max_tokens


@given(groups=GROUPS, max_tokens=st.integers(10, 100))
def test_sharing_never_makes_more_micro_batches(groups: list[tuple[int, list[int]]], max_tokens: int) -> None:
    rows = rows_of(groups)
    lengths, limit = list(map(len, rows)), MicroBatchLimit(max_tokens=max_tokens)
    [shared], [plain] = assign_rows(lengths, 1, limit, find_prefixes(rows)), assign_rows(lengths, 1, limit)
    assert len(shared) <= len(plain)


def test_groups_that_fill_half_a_micro_batch_are_cut_to_fill_it() -> None:
    """16 groups of a prompt of 64 and eight responses of 512: each would leave nearly half of 7,800 empty."""
    rows = rows_of([(64, [512] * 8)] * 16)
    [batches] = assign_rows(list(map(len, rows)), 1, MicroBatchLimit(max_tokens=7800), find_prefixes(rows))
    assert len(batches) == 10


@given(groups=GROUPS, ranks=st.integers(1, 4), max_rows=st.integers(1, 9))
def test_the_rows_limit_is_kept_with_shared_prefixes(
    groups: list[tuple[int, list[int]]], ranks: int, max_rows: int
) -> None:
    rows = rows_of(groups)
    assigned = assign_rows(
        list(map(len, rows)), ranks, MicroBatchLimit(max_rows=max_rows), find_prefixes(rows)
    )
    assert sorted(row for rank in assigned for batch in rank for row in batch) == list(range(len(rows)))
    assert max(len(batch) for rank in assigned for batch in rank) <= max_rows


@given(lengths=LENGTHS, ranks=st.integers(1, 4), max_tokens=st.integers(10, 100))
def test_rows_that_share_nothing_lie_where_they_always_lay(
    lengths: list[int], ranks: int, max_tokens: int
) -> None:
    rows = [np.full(length, row) for row, length in enumerate(lengths)]
    limit = MicroBatchLimit(max_tokens=max_tokens)
    assert assign_rows(lengths, ranks, limit, find_prefixes(rows)) == assign_rows(lengths, ranks, limit)


def test_groups_stay_together() -> None:
    """Four groups of a prompt of 30 and four responses of 10, on two ranks with micro-batches of 80."""
    rows = rows_of([(30, [10] * 4)] * 4)
    assigned = assign_rows(list(map(len, rows)), 2, MicroBatchLimit(max_tokens=80), find_prefixes(rows))
    groups = [{row // 4 for row in batch} for rank in assigned for batch in rank]
    assert [len(group) for group in groups] == [1] * 4


@given(groups=GROUPS, parts=st.integers(1, 4))
def test_no_rank_waits_longer_than_if_every_row_had_been_placed_alone(
    groups: list[tuple[int, list[int]]], parts: int
) -> None:
    rows = rows_of(groups)
    prefixes, lengths = find_prefixes(rows), list(map(len, rows))

    def most(split: list[list[int]]) -> int:
        families = [prefixes.of(part).saved_tokens for part in split]
        return max(
            sum(lengths[row] for row in part) - saved for part, saved in zip(split, families, strict=True)
        )

    assert most(balanced_partition(lengths, parts, prefixes)) <= most(balanced_partition(lengths, parts))


def test_a_tree_beyond_the_limit_is_cut() -> None:
    rows = rows_of([(30, [10] * 6)])
    [batches] = assign_rows(list(map(len, rows)), 1, MicroBatchLimit(max_tokens=60), find_prefixes(rows))
    assert [num_computed(rows, batch) for batch in batches] == [60, 60]
