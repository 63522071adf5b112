"""Rollout correction of an update's mini-batches on one rank: made in the actor, or made before in the
driver."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.algorithm.losses import token_mean
from verl_rc.algorithm.ppo.choices import needs_statistics_first
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction import (
    CorrectionStatistics,
    SequenceContext,
    correct_sequences,
    interpolate_proximal,
    measure,
    require_finite,
)
from verl_rc.metrics.mergeable import Mean
from verl_rc.records.batches import TokenScores, TrainBatch

CurrentLogProbs = Callable[[Sequence[int]], tuple[TrainBatch, Tensor]]
"""Rows of a micro-batch to the rows themselves and their current log-probs ``[B, R]``, without gradient."""


@dataclass(frozen=True)
class OverRanks:
    """Reductions over the ranks that share every mini-batch, collective. The tensor given may change."""

    sum: Callable[[Tensor], Tensor]
    maximum: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    """The statistics that rollout correction measured in a step."""

    statistics: CorrectionStatistics
    """Statistics of the whole step."""
    before_update: CorrectionStatistics | None
    """Statistics of the tokens scored before any update; the gap of engine and trainer follows from them.
    None when an update was made before a token with two finite log-probs came."""
    signatures: CorrectionStatistics | None = None
    """Signatures of the actor's first mini-batch, with full diagnostics. None where ``statistics`` have
    them."""


class Corrected:
    """The driver has corrected: nothing is left to do. The methods are those of ``ActorCorrection``."""

    reads_entropies = reads_squares = False
    seconds = 0.0
    before_update = None

    def begin_mini_batch(
        self, share: MiniBatch, num_updates: int, current: CurrentLogProbs
    ) -> tuple[int, int]:
        """The planned denominators."""
        del num_updates, current
        return share.num_tokens, share.num_sequences

    def preview(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        """The micro-batch itself."""
        del log_probs
        return batch

    def correct(self, batch: TrainBatch, current: TokenScores) -> tuple[TrainBatch, dict[str, Mean[Tensor]]]:
        """The micro-batch itself."""
        del current
        return batch, {}

    def end_mini_batch(self, share: MiniBatch, num_updates: int) -> int:
        """The planned number of tokens."""
        del num_updates
        return share.num_loss_tokens

    def measured(self) -> None:
        """Nothing was measured here."""


class ActorCorrection:
    """The actor corrects, by the log-probs of its current policy, and merges what it measures."""

    reads_entropies = True
    """Whether ``correct`` reads entropies of the current policy."""

    def __init__(
        self,
        config: RolloutCorrectionConfig,
        by_age: bool,
        by_turn: bool,
        policy_version: int,
        updates_per_step: int,
        ranks: OverRanks,
        compares_proximal: bool,
    ) -> None:
        """With ``compares_proximal`` interpolated log-probs of the proximal policy are compared with
        ``TrainBatch.old_log_probs``, which the step has recomputed for it; the others as in
        ``InActor.during_update``."""
        self.seconds = 0.0
        """Seconds spent on passes without gradient that only served statistics."""
        self.before_update: CorrectionStatistics | None = None
        """The part of ``Measured.before_update`` that is known so far."""
        self._config = config
        self._by_age = by_age
        self._by_turn = by_turn
        self._policy_version = policy_version
        self._updates_per_step = updates_per_step
        self._ranks = ranks
        self._compares_proximal = compares_proximal
        self._num_updates = 0
        self._measured_first: CorrectionStatistics | None = None
        """Statistics of the mini-batch over all ranks, where the loss needs them before its first
        micro-batch."""
        self._corrected: CorrectionStatistics | None = None
        """Statistics of this rank's micro-batches of the mini-batch that were corrected so far."""
        self._counts: Tensor | None = None
        """The sum of ``loss_counts`` of these micro-batches."""
        self._step: CorrectionStatistics | None = None
        """Statistics of the mini-batches that have ended, over all ranks."""
        self._signatures: CorrectionStatistics | None = None
        """Signatures of this rank's micro-batches of the first mini-batch."""

    @property
    def reads_squares(self) -> bool:
        """Whether ``correct`` reads sums of squared probabilities, for signatures: with full diagnostics, in
        the first mini-batch. After it the policies differ by design."""
        return self._step is None and self._config.diagnostics == "full"

    def begin_mini_batch(
        self, share: MiniBatch, num_updates: int, current: CurrentLogProbs
    ) -> tuple[int, int]:
        """Begin a mini-batch after ``num_updates`` optimizer updates of the step; measure all of it in a pass
        without gradient, if its loss depends on it. Returns the denominators of the loss, tokens and
        sequences. Collective."""
        self._num_updates, self._measured_first = num_updates, None
        planned = share.num_tokens, share.num_sequences
        if not needs_statistics_first(self._config):
            return planned
        started = time.perf_counter()
        for rows in share.micro_batches:  # a row's mask depends on no other row, nor on normalised weights
            self._correct(*current(rows))
        self._measured_first, counts = self._totals()
        self.seconds += time.perf_counter() - started
        return counts if self._config.rejection_denominator == "kept" else planned

    def preview(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        """The micro-batch as ``correct`` will return it, without adding to the statistics."""
        return self._against_rollout(batch, log_probs)[0]

    def correct(self, batch: TrainBatch, current: TokenScores) -> tuple[TrainBatch, dict[str, Mean[Tensor]]]:
        """The micro-batch with weights and ``loss_mask`` from its current log-probs, and averages by metric
        name."""
        assert current.entropies is not None
        if self.reads_squares:
            self._signatures = _merged(self._signatures, measure_signatures(batch, current))
        corrected = self._correct(batch, current.log_probs.detach())  # constants of the loss
        averages = {"actor/update_entropy": token_mean(current.entropies, batch.response_mask)}
        if self._compares_proximal:
            gap = (corrected.old_log_probs - batch.old_log_probs).abs()
            averages["actor/proximal_interpolation_gap"] = token_mean(gap, batch.response_mask)
        return corrected, averages

    def _correct(self, batch: TrainBatch, log_probs: Tensor) -> TrainBatch:
        corrected, statistics = self._against_rollout(batch, log_probs)
        self._corrected = _merged(self._corrected, statistics)
        counts = loss_counts(corrected)
        self._counts = counts if self._counts is None else self._counts + counts
        return corrected

    def _against_rollout(
        self, batch: TrainBatch, log_probs: Tensor
    ) -> tuple[TrainBatch, CorrectionStatistics]:
        """The micro-batch, corrected by the ratio of the current (or interpolated proximal) policy to the
        rollout policy, and the statistics of that ratio."""
        if self._config.mode == "interpolated":
            batch = with_interpolated_proximal(
                batch, log_probs, self._policy_version, self._num_updates, self._updates_per_step
            )
            log_probs = batch.old_log_probs
        version = self._policy_version if self._by_age else None
        return corrected_current(
            batch, log_probs, self._config, version, self._measured_first, by_turn=self._by_turn
        )

    def end_mini_batch(self, share: MiniBatch, num_updates: int) -> int:
        """End a mini-batch; returns the number of its tokens, over all ranks, in the loss. Collective.

        Raises ``NonFiniteLogProbError`` when too many of its log-probs are not finite.
        """
        del share
        mini_batch, (num_tokens, _) = self._totals()
        # From totals over all ranks, so that all of them raise: the others would wait for one that raises
        # alone in the next collective.
        require_finite(mini_batch.nonfinite_fraction, self._config)
        self._step = _merged(self._step, mini_batch)
        if not num_updates:  # after an update the two policies differ by design
            self.before_update = self._step
        return num_tokens

    def _totals(self) -> tuple[CorrectionStatistics, tuple[int, int]]:
        """Statistics and counts of the micro-batches corrected since the last call, over all ranks."""
        # A rank whose rows are all padding takes part too: an all-reduce waits for every rank.
        assert self._corrected is not None
        assert self._counts is not None
        statistics = self._over_ranks(self._corrected)
        num_tokens, num_sequences = self._ranks.sum(self._counts).tolist()
        self._corrected = self._counts = None
        return statistics, (num_tokens, num_sequences)

    def measured(self) -> Measured | None:
        """The statistics over all mini-batches and ranks, on the CPU. Collective."""
        if self._step is None:  # every mini-batch was skipped
            return None
        signatures = None if self._signatures is None else _on_cpu(self._over_ranks(self._signatures))
        before = None if self.before_update is None else _on_cpu(self.before_update)
        return Measured(_on_cpu(self._step), before, signatures)

    def _over_ranks(self, statistics: CorrectionStatistics) -> CorrectionStatistics:
        return statistics.with_vectors(
            self._ranks.sum(statistics.sums.clone()), self._ranks.maximum(statistics.maxima.clone())
        )


MiniBatchCorrection = Corrected | ActorCorrection
"""Correction of the mini-batches of an update, one after the other."""


def _merged(total: CorrectionStatistics | None, part: CorrectionStatistics) -> CorrectionStatistics:
    return part if total is None else total.merge(part)


def _on_cpu(statistics: CorrectionStatistics) -> CorrectionStatistics:
    # Ray would otherwise send a GPU tensor to a driver without a GPU.
    return statistics.with_vectors(statistics.sums.cpu(), statistics.maxima.cpu())


def corrected_current(
    batch: TrainBatch,
    log_probs: Tensor,
    config: RolloutCorrectionConfig,
    policy_version: int | None,
    mini_batch: CorrectionStatistics | None = None,
    *,
    by_turn: bool = True,
) -> tuple[TrainBatch, CorrectionStatistics]:
    """The micro-batch with ``loss_mask`` and weights by the ratio of ``log_probs`` to the batch's rollout
    log-probs, and mergeable statistics of that ratio.

    ``log_probs`` (float32 ``[B, R]``, nats, detached) are current ones, or those of the interpolated proximal
    policy. Ages count from ``policy_version``; None: they are not measured. The statistics lack effective
    sample sizes of prompts, whose rows may lie on several ranks. ``mini_batch`` are the statistics of the
    whole mini-batch, for weights that are normalised by its mean.
    """
    context = SequenceContext(
        policy_versions=batch.policy_versions,
        current_version=policy_version,
        advantages=batch.advantages,
        scores=batch.scores,
        by_turn=by_turn,
    )
    result = correct_sequences(
        log_probs, batch.rollout_log_probs, batch.comparable_mask, config, context, mini_batch
    )
    corrected = batch.clone(recurse=False)
    corrected.loss_mask = batch.response_mask & batch.loss_mask & result.keep_mask
    corrected.rollout_is_weights = result.weights if config.applies_weights else None
    return corrected, result.statistics


def measure_signatures(batch: TrainBatch, current: TokenScores) -> CorrectionStatistics:
    """Mergeable statistics with the signatures of a micro-batch, which are meaningful before the first update
    alone."""
    context = SequenceContext(
        entropies=current.entropies,
        sum_pi_squared=current.sum_pi_squared,
        varentropies=current.varentropies,
        engines=batch.engines,
        by_turn=False,
    )
    config = RolloutCorrectionConfig(diagnostics="full")
    return measure(current.log_probs, batch.rollout_log_probs, batch.comparable_mask, config, context)


def with_interpolated_proximal(
    batch: TrainBatch, log_probs: Tensor, policy_version: int, updates: int, updates_per_step: int
) -> TrainBatch:
    """The micro-batch with log-probs of the proximal policy between those of the rollout policy and current
    ``log_probs``.

    Versions count optimizer updates here: ``updates`` of ``updates_per_step`` were made since
    ``policy_version``. Before the first update current and proximal policy are the same. A token without a
    finite rollout log-prob gets the current one.
    """
    proximal = log_probs
    if updates:
        first = policy_version * updates_per_step
        versions = batch.policy_versions * updates_per_step
        rollout = batch.rollout_log_probs
        proximal = interpolate_proximal(rollout, log_probs, versions, first, first + updates)
        proximal = torch.where(rollout.isfinite(), proximal, log_probs)
    interpolated = batch.clone(recurse=False)
    interpolated.old_log_probs = proximal
    return interpolated


def loss_counts(batch: TrainBatch) -> Tensor:
    """int64 ``[2]``: tokens in the loss, and rows with at least one of them."""
    return torch.stack([batch.loss_mask.sum(), batch.loss_mask.any(dim=-1).sum()])
