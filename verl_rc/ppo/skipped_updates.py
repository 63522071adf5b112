"""Stopping a run of which rejection leaves nothing to train on."""

from collections.abc import Iterable


class TooManySkippedUpdatesError(RuntimeError):
    """Nothing was left of too many mini-batches in a row."""


def count_skipped_updates(in_a_row: int, kept_tokens: Iterable[int], limit: int) -> int:
    """Optimizer steps in a row that were skipped because no token of their mini-batch was kept.

    ``in_a_row`` were skipped up to now; ``kept_tokens`` are those of each following mini-batch, in their order. Raises
    ``TooManySkippedUpdatesError`` at ``limit`` (``algorithm.rollout_correction.max_skipped_updates``).
    """
    for count in kept_tokens:
        in_a_row = 0 if count else in_a_row + 1
        if in_a_row >= limit:
            raise TooManySkippedUpdatesError(
                "rollout correction must leave something of a mini-batch, but it rejected every token of "
                f"{in_a_row} in a row. Look at rollout_corr/kl and the rollout_rs_* metrics: widen "
                "algorithm.rollout_correction.rollout_rs_threshold, or find out why trainer and engine disagree. "
                "algorithm.rollout_correction.max_skipped_updates sets the limit."
            )
    return in_a_row
