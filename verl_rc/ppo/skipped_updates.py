"""Stopping a run of which rejection leaves nothing to train on."""

from collections.abc import Iterable


class TooManySkippedUpdatesError(RuntimeError):
    """Nothing was left of too many mini-batches in a row."""


class SkippedUpdateGuard:
    """Counts optimizer steps in a row that were skipped because no token of their mini-batch was kept."""

    def __init__(self, limit: int) -> None:
        """``limit``: ``algorithm.rollout_correction.max_skipped_updates``."""
        self._limit = limit
        self.in_a_row = 0
        """How many were skipped since the last one that was not; belongs in a checkpoint."""

    def observe(self, kept_tokens: Iterable[int]) -> None:
        """Take the kept tokens of each mini-batch in, in their order; raises ``TooManySkippedUpdatesError`` at the limit."""
        for count in kept_tokens:
            self.in_a_row = 0 if count else self.in_a_row + 1
            if self.in_a_row >= self._limit:
                raise TooManySkippedUpdatesError(
                    "rollout correction must leave something of a mini-batch, but it rejected every token of "
                    f"{self.in_a_row} in a row. Look at rollout_corr/kl and the rollout_rs_* metrics: widen "
                    "algorithm.rollout_correction.rollout_rs_threshold, or find out why trainer and engine disagree. "
                    "algorithm.rollout_correction.max_skipped_updates sets the limit."
                )
