"""Rollout correction in the actor, in bypass mode and with an interpolated proximal policy: of a mini-batch
over all its micro-batches and ranks."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from verl_rc.correction import CorrectionStatistics, require_finite
from verl_rc.data.batches import TokenScores, TrainBatch
from verl_rc.distributed.process_group import DeviceMesh, all_reduce_max, all_reduce_sum
from verl_rc.ppo.choices import needs_statistics_first
from verl_rc.ppo.objective import (
    MiniBatchCounts,
    corrected_current,
    loss_counts,
    measure_signatures,
    with_interpolated_proximal,
)
from verl_rc.weight_sync.proof import LogProbGap
from verl_rc.workers.updates import UpdateRequest

CurrentLogProbs = Callable[[Sequence[int]], tuple[TrainBatch, Tensor]]
"""Rows of a micro-batch to the rows themselves and their current log-probs ``[B, R]``, without gradient."""


class ActorCorrection:
    """Corrects one mini-batch after the other and keeps the statistics of them all."""

    def __init__(self, request: UpdateRequest, updates_per_step: int, mesh: DeviceMesh) -> None:
        """``updates_per_step``: mini-batches of the step. ``mesh``: the data-parallel ranks that share every
        mini-batch."""
        self.updates = 0
        """Optimizer updates of the step so far."""
        self._updates_per_step = updates_per_step
        self._config = request.correction
        self._mesh = mesh
        self._policy_version = request.policy_version
        self._measured_before: CorrectionStatistics | None = None
        """Statistics of the mini-batch over all ranks, where the loss needs them before its first
        micro-batch."""
        self._corrected: CorrectionStatistics | None = None
        """Statistics of this rank's micro-batches of the mini-batch that were corrected so far, in one pass
        over it."""
        self._in_loss: Tensor | None = None
        """Of these micro-batches, tokens in the loss, and rows with any."""
        self._step_statistics: CorrectionStatistics | None = None
        """Statistics of the mini-batches that have ended, over all ranks."""
        self._signatures: CorrectionStatistics | None = None
        """Signatures of this rank's micro-batches of the first mini-batch."""
        self.statistics_seconds = 0.0
        """Seconds spent on passes without gradient that only served statistics."""

    def measure_mini_batch(
        self, micro_batches: Sequence[Sequence[int]], current: CurrentLogProbs
    ) -> MiniBatchCounts | None:
        """Measure the mini-batch in a pass without gradient, if the loss depends on it as a whole;
        collective.

        Returns the loss's denominators, or None where they are known without the pass.
        """
        self._measured_before = None
        if not needs_statistics_first(self._config):
            return None
        started = time.perf_counter()
        for rows in micro_batches:  # what is kept is decided by each row for itself: no weight matters yet
            self.correct(*current(rows))
        self._measured_before, counts = self._totals()
        self.statistics_seconds += time.perf_counter() - started
        return counts if self._config.rejection_denominator == "kept" else None

    def correct(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        """The micro-batch with weights and ``loss_mask`` from its current log-probs ``[B, R]``."""
        # Weights and masks are constants of the loss.
        corrected, statistics = self._against_rollout(batch, log_probs.detach())
        self._corrected = _merged(self._corrected, statistics)
        counts = loss_counts(corrected)
        self._in_loss = counts if self._in_loss is None else self._in_loss + counts
        return corrected

    @property
    def measures_signatures(self) -> bool:
        """Whether signatures of the mini-batch are wanted: those of the first one, after which the policies
        differ by design."""
        return self._step_statistics is None and self._config.diagnostics == "full"

    def measure_first_signatures(self, batch: TrainBatch, current: TokenScores) -> None:
        """Measure the signatures of a micro-batch, if they are wanted."""
        if self.measures_signatures:
            self._signatures = _merged(self._signatures, measure_signatures(batch, current))

    def preview(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        """The micro-batch as ``correct`` will return it, without adding to the statistics."""
        return self._against_rollout(batch, log_probs)[0]

    def _against_rollout(
        self, batch: TrainBatch, log_probs: Tensor
    ) -> tuple[TrainBatch, CorrectionStatistics]:
        """The micro-batch, corrected by current or interpolated proximal log-probs over the rollout policy's,
        and their statistics."""
        if not self._config.bypass_mode:
            batch = with_interpolated_proximal(
                batch, log_probs, self._policy_version, self.updates, self._updates_per_step
            )
            assert batch.proximal_log_probs is not None
            log_probs = batch.proximal_log_probs
        return corrected_current(batch, log_probs, self._config, self._policy_version, self._measured_before)

    def finish(self) -> int:
        """End a mini-batch; returns how many of its tokens, over all ranks, are in the loss. Collective.

        Raises ``NonFiniteLogProbError`` when too many of its log-probs are not finite.
        """
        mini_batch, counts = self._totals()
        # From totals over all ranks: all of them raise, or none. One alone would leave the others waiting in
        # the next collective.
        require_finite(mini_batch.nonfinite_fraction, self._config)
        self._step_statistics = _merged(self._step_statistics, mini_batch)
        return counts.num_tokens

    def _totals(self) -> tuple[CorrectionStatistics, MiniBatchCounts]:
        """Statistics and counts of the micro-batches corrected since the last call, over all ranks;
        collective."""
        # Every rank takes part, also one whose rows are all padding: an all-reduce waits for all of them.
        assert self._corrected is not None
        assert self._in_loss is not None
        statistics = self._over_ranks(self._corrected)
        counts = MiniBatchCounts(*all_reduce_sum(self._in_loss, self._mesh).tolist())
        self._corrected = self._in_loss = None
        return statistics, counts

    def gap(self) -> LogProbGap | None:
        """Mean and extreme |current - rollout| over the mini-batches so far, over all ranks; None when no
        token has two finite log-probs."""
        assert self._step_statistics is not None
        return LogProbGap.from_statistics(self._step_statistics)

    def statistics(self) -> CorrectionStatistics:
        """Return the statistics of all mini-batches and ranks, on the CPU."""
        assert self._step_statistics is not None
        return _on_cpu(self._step_statistics)

    def signatures(self) -> CorrectionStatistics | None:
        """Return those of the first mini-batch over all ranks, on the CPU; None without full diagnostics.
        Collective."""
        return None if self._signatures is None else _on_cpu(self._over_ranks(self._signatures))

    def _over_ranks(self, statistics: CorrectionStatistics) -> CorrectionStatistics:
        return statistics.with_vectors(
            all_reduce_sum(statistics.sums.clone(), self._mesh),
            all_reduce_max(statistics.maxima.clone(), self._mesh),
        )


def _merged(total: CorrectionStatistics | None, part: CorrectionStatistics) -> CorrectionStatistics:
    return part if total is None else total.merge(part)


def _on_cpu(statistics: CorrectionStatistics) -> CorrectionStatistics:
    # Ray would otherwise send a GPU tensor to a driver without a GPU.
    return statistics.with_vectors(statistics.sums.cpu(), statistics.maxima.cpu())
