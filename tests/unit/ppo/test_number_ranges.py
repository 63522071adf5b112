"""Sets of numbers as ranges say what plain sets say, and survive JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_rc.ppo.admission import NumberRanges

NUMBERS = st.sets(st.integers(0, 40), max_size=30)


@given(NUMBERS, NUMBERS, st.integers(0, 45))
def test_ranges_are_sets(one: set[int], other: set[int], end: int) -> None:
    ranges, others = NumberRanges.from_numbers(one), NumberRanges.from_numbers(other)
    assert list(ranges) == sorted(one)
    assert len(ranges) == len(one)
    assert [number for number in range(-1, 45) if number in ranges] == sorted(one)
    assert set(ranges.union(others)) == one | other
    assert set(ranges.missing_below(end)) == set(range(end)) - one
    assert NumberRanges.from_plain(json.loads(json.dumps(ranges.ranges))) == ranges


def test_a_long_run_of_numbers_is_one_pair() -> None:
    assert NumberRanges.from_numbers([*range(1000), 1001]).ranges == ((0, 1000), (1001, 1002))
    assert NumberRanges.from_numbers(range(5)).union(NumberRanges.from_numbers([5])).ranges == ((0, 6),)


@pytest.mark.parametrize("plain", [[[3, 3]], [[2, 1]], [[4, 5], [1, 2]], [[1, 3], [3, 4]], [[-1, 2]], [[1]]])
def test_ranges_that_are_none_are_refused(plain: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="ranges must be ascending pairs"):
        NumberRanges.from_plain(plain)
