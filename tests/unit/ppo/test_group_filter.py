"""Prompts with one value only tell nothing."""

import pytest

from verl_rc.ppo.group_filter import informative_groups


def test_groups_of_one_value_are_left_out() -> None:
    assert informative_groups([1, 1, 0, 1, 0, 0, 0.5], [7, 7, 3, 3, 9, 9, 5]) == [3, 5]


def test_rows_of_a_group_need_not_be_adjacent() -> None:
    assert informative_groups([0, 1, 1, 1], [2, 4, 2, 4]) == [2]


def test_nothing_in_nothing_out() -> None:
    assert informative_groups([], []) == []


def test_one_value_per_sample() -> None:
    with pytest.raises(ValueError, match="argument"):
        informative_groups([1.0], [0, 0])
