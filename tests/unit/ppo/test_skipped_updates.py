"""Skipped updates in a row are counted across steps."""

import pytest

from verl_rc.ppo.skipped_updates import TooManySkippedUpdatesError, count_skipped_updates

EMPTY, FULL = 0, 5
"""Kept tokens of a mini-batch."""


def test_an_update_in_between_starts_the_count_again() -> None:
    in_a_row = 0
    for step, expected in (([EMPTY, EMPTY, FULL], 0), ([EMPTY, EMPTY], 2), ([FULL], 0), ([EMPTY, EMPTY], 2)):
        in_a_row = count_skipped_updates(in_a_row, step, limit=3)
        assert in_a_row == expected


def test_the_limit_holds_across_steps_and_at_once() -> None:
    in_a_row = count_skipped_updates(0, [FULL, EMPTY, EMPTY], limit=3)
    with pytest.raises(TooManySkippedUpdatesError, match="every token of 3 in a row"):
        count_skipped_updates(in_a_row, [EMPTY, FULL], limit=3)
