"""Balanced partition: complete, level in rows, near level in tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.data.microbatch import balanced_partition


@given(lengths=st.lists(st.integers(1, 1000), max_size=60), parts=st.integers(1, 5))
def test_every_row_once_and_rows_level(lengths: list[int], parts: int) -> None:
    split = balanced_partition(lengths, parts)
    assert sorted(row for part in split for row in part) == list(range(len(lengths)))
    assert max(map(len, split)) <= -(-len(lengths) // parts)


def test_tokens_are_level_for_a_known_case() -> None:
    split = balanced_partition([9, 1, 8, 2, 7, 3], 2)
    assert sorted(sum([9, 1, 8, 2, 7, 3][row] for row in part) for part in split) == [14, 16]


def test_no_parts_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one part"):
        balanced_partition([1], 0)
