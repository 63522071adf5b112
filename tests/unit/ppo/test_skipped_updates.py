"""The guard counts skipped updates in a row, across steps."""

import pytest

from verl_rc.ppo.skipped_updates import SkippedUpdateGuard, TooManySkippedUpdatesError

EMPTY, FULL = 0, 5
"""Kept tokens of a mini-batch."""


def test_an_update_in_between_starts_the_count_again() -> None:
    guard = SkippedUpdateGuard(limit=3)
    for step in ([EMPTY, EMPTY, FULL], [EMPTY, EMPTY], [FULL], [EMPTY, EMPTY]):
        guard.observe(step)


def test_the_limit_holds_across_steps() -> None:
    guard = SkippedUpdateGuard(limit=3)
    guard.observe([FULL, EMPTY, EMPTY])
    with pytest.raises(TooManySkippedUpdatesError, match="every token of 3 in a row"):
        guard.observe([EMPTY, FULL])
