"""Rollout correction in the actor, in bypass mode and with an interpolated proximal policy: its statistics
over all micro-batches and ranks of a mini-batch."""

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from verl_rc.algorithm.ppo.choices import needs_statistics_first
from verl_rc.algorithm.ppo.objective import (
    corrected_current,
    loss_counts,
    measure_signatures,
    with_interpolated_proximal,
)
from verl_rc.correction import CorrectionStatistics, require_finite
from verl_rc.records.batches import TokenScores, TrainBatch
from verl_rc.runtime.distributed.process_group import DeviceMesh, all_reduce_max, all_reduce_sum
from verl_rc.runtime.weight_sync.proof import LogProbGap
from verl_rc.runtime.workers.updates import UpdateRequest

CurrentLogProbs = Callable[[Sequence[int]], tuple[TrainBatch, Tensor]]
"""Rows of a micro-batch to the rows themselves and their current log-probs ``[B, R]``, without gradient."""


class ActorCorrection:
    """Corrects the mini-batches of a step one after the other and merges their statistics."""

    def __init__(self, request: UpdateRequest, updates_per_step: int, mesh: DeviceMesh) -> None:
        """``updates_per_step``: mini-batches of the step. ``mesh``: the data-parallel ranks that share every
        mini-batch."""
        self.updates = 0
        """Optimizer updates of the step so far."""
        self.compares_proximal = request.compares_proximal
        """See ``UpdateRequest``."""
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
        self._loss_counts: Tensor | None = None
        """The sum of ``loss_counts`` of these micro-batches."""
        self._step_statistics: CorrectionStatistics | None = None
        """Statistics of the mini-batches that have ended, over all ranks."""
        self._signatures: CorrectionStatistics | None = None
        """Signatures of this rank's micro-batches of the first mini-batch."""
        self.statistics_seconds = 0.0
        """Seconds spent on passes without gradient that only served statistics."""

    def measure_mini_batch(
        self, micro_batches: Sequence[Sequence[int]], current: CurrentLogProbs
    ) -> tuple[int, int] | None:
        """Measure the whole mini-batch in a pass without gradient, if the loss depends on it; collective.

        Returns the loss's denominators, tokens and sequences; None where they do not depend on the
        correction.
        """
        self._measured_before = None
        if not needs_statistics_first(self._config):
            return None
        started = time.perf_counter()
        for rows in micro_batches:  # the mask of a row depends on no other row, nor on the normalised weights
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
        self._loss_counts = counts if self._loss_counts is None else self._loss_counts + counts
        return corrected

    @property
    def measures_signatures(self) -> bool:
        """Whether signatures of this mini-batch are measured: full diagnostics measure those of the first
        one, after which the policies differ by design."""
        return self._step_statistics is None and self._config.diagnostics == "full"

    def measure_first_signatures(self, batch: TrainBatch, current: TokenScores) -> None:
        """Measure the signatures of a micro-batch where ``measures_signatures``."""
        if self.measures_signatures:
            self._signatures = _merged(self._signatures, measure_signatures(batch, current))

    def preview(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        """The micro-batch as ``correct`` will return it, without adding to the statistics."""
        return self._against_rollout(batch, log_probs)[0]

    def _against_rollout(
        self, batch: TrainBatch, log_probs: Tensor
    ) -> tuple[TrainBatch, CorrectionStatistics]:
        """The micro-batch, corrected by the ratio of the current (or interpolated proximal) policy to the
        rollout policy, and the statistics of that ratio."""
        if not self._config.bypass_mode:
            batch = with_interpolated_proximal(
                batch, log_probs, self._policy_version, self.updates, self._updates_per_step
            )
            assert batch.proximal_log_probs is not None
            log_probs = batch.proximal_log_probs
        return corrected_current(batch, log_probs, self._config, self._policy_version, self._measured_before)

    def end_mini_batch(self) -> int:
        """End a mini-batch; returns the number of its tokens, over all ranks, in the loss. Collective.

        Raises ``NonFiniteLogProbError`` when too many of its log-probs are not finite.
        """
        mini_batch, (num_tokens, _) = self._totals()
        # From totals over all ranks, so that all of them raise: the others would wait for one that raises
        # alone in the next collective.
        require_finite(mini_batch.nonfinite_fraction, self._config)
        self._step_statistics = _merged(self._step_statistics, mini_batch)
        return num_tokens

    def _totals(self) -> tuple[CorrectionStatistics, tuple[int, int]]:
        """Statistics and counts of the micro-batches corrected since the last call, over all ranks;
        collective."""
        # A rank whose rows are all padding takes part too: an all-reduce waits for every rank.
        assert self._corrected is not None
        assert self._loss_counts is not None
        statistics = self._over_ranks(self._corrected)
        num_tokens, num_sequences = all_reduce_sum(self._loss_counts, self._mesh).tolist()
        self._corrected = self._loss_counts = None
        return statistics, (num_tokens, num_sequences)

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
        """Return the signatures of the first mini-batch over all ranks, on the CPU; None without full
        diagnostics. Collective."""
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
