"""Stopping a run of which rejection leaves nothing to train on."""

from collections.abc import Sequence

from verl_rc.ppo.mini_batches import MiniBatch


class TooManySkippedUpdatesError(RuntimeError):
    """Nothing was left of too many mini-batches in a row."""


class SkippedUpdateGuard:
    """Counts optimizer steps in a row that were skipped because no token of their mini-batch was kept."""

    def __init__(self, limit: int) -> None:
        """``limit``: ``algorithm.rollout_correction.max_skipped_updates``."""
        self._limit = limit
        self._in_a_row = 0

    def observe(self, mini_batches: Sequence[MiniBatch]) -> None:
        """Take the mini-batches of one step in, in their order; raises ``TooManySkippedUpdatesError`` at the limit."""
        for mini in mini_batches:
            self._in_a_row = 0 if mini.num_loss_tokens else self._in_a_row + 1
            if self._in_a_row >= self._limit:
                raise TooManySkippedUpdatesError(
                    "rollout correction must leave something of a mini-batch, but it rejected every token of "
                    f"{self._in_a_row} in a row. Look at rollout_corr/kl and the rollout_rs_* metrics: widen "
                    "algorithm.rollout_correction.rollout_rs_threshold, or find out why trainer and engine disagree. "
                    "algorithm.rollout_correction.max_skipped_updates sets the limit."
                )
