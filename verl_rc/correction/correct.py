"""THE PAGE of rollout correction: from log-probs to weights, keep mask and statistics, chunk by chunk."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig, WeightSettings
from verl_rc.correction.histogram import log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.rejection import reject_sequences, reject_tokens
from verl_rc.correction.sequences import (
    LogProbs,
    SequenceChunk,
    SequenceContext,
    newest_version,
    sequence_chunks,
)
from verl_rc.correction.statistics import CorrectionStatistics, measure_sequences, measure_tokens
from verl_rc.correction.totals import TokenSums, join_sequences
from verl_rc.correction.weights import importance_weights
from verl_rc.metrics.log_ratio_bins import NUM_BINS
from verl_rc.tensor_ops.masked import group_numbers


@dataclass(frozen=True)
class CorrectionResult:
    """Rollout correction of one batch."""

    weights: Tensor | None
    """``[B, T]``, constants, 0 outside the response mask; None when ``rollout_is`` is null."""
    keep_mask: Tensor
    """bool ``[B, T]``: what takes part in the policy loss; True on padding of sequences that are not rejected
    as a whole."""
    rejected_rows: Tensor
    """bool ``[B]``: sequences with response tokens, all of them rejected."""
    statistics: CorrectionStatistics
    """What was measured, before rejection."""
    config: RolloutCorrectionConfig

    def metrics(self) -> dict[str, float]:
        """``rollout_corr/*`` by name; one copy from the device."""
        return self.statistics.metrics(self.config)


@torch.no_grad()
def compute_rollout_correction(  # noqa: PLR0913  (a public function: named arguments for notebooks and other trainers)
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    advantages: Tensor | None = None,
    group_ids: Tensor | Sequence[str] | Sequence[int] | None = None,
    policy_versions: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    entropies: Tensor | None = None,
    sum_pi_squared: Tensor | None = None,
    varentropies: Tensor | None = None,
    engines: Tensor | None = None,
    current_version: int | None = None,
) -> CorrectionResult:
    """Measure and apply rollout correction on a whole batch.

    The ratio is always train over rollout.

    Args:
        train_log_probs: ``[B, T]``, nats.
        rollout_log_probs: ``[B, T]``, nats.
        response_mask: ``[B, T]``.
        config: The model, or a mapping of its fields.
        advantages: ``[B, T]``; rules that look at their sign need them.
        group_ids: The prompt of each sequence; read with ``diagnostics=full``.
        policy_versions: int ``[B, T]`` or ``[B]``; with any diagnostics, to measure by token age.
        scores: ``[B]``, above 0 is correct; read with ``diagnostics=full``.
        entropies: ``[B, T]``, nats, of the train policy's distributions; read with ``diagnostics=full``.
        sum_pi_squared: ``[B, T]``, sums of their squared probabilities; read with ``diagnostics=full``.
        varentropies: ``[B, T]``, nats^2, variances of the log-prob of a token drawn from them; read with
            ``diagnostics=full``. Without them there is no ``surprisal_excess_bound``.
        engines: int ``[B]``, number of the engine that sampled each sequence; read with ``diagnostics=full``.
        current_version: Version from which ages count; None: the newest of ``policy_versions``.

    Raises:
        ValueError: Shapes differ, advantages are missing, or a log-prob is not finite under
            ``nonfinite_logprob=raise``.
    """
    config = _as_config(config)
    context = SequenceContext(
        group_slots=None if group_ids is None else group_numbers(group_ids, train_log_probs.device),
        policy_versions=policy_versions,
        current_version=current_version,
        advantages=advantages,
        scores=scores,
        entropies=entropies,
        sum_pi_squared=sum_pi_squared,
        varentropies=varentropies,
        engines=engines,
    )
    context.check(train_log_probs.shape)
    if policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(policy_versions, response_mask))
    result = correct_sequences(train_log_probs, rollout_log_probs, response_mask, config, context)
    if config.nonfinite_logprob == "raise":
        require_finite(result.statistics.nonfinite_fraction, config)
    return result


@torch.no_grad()
def correct_sequences(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    context: SequenceContext,
    batch: CorrectionStatistics | None = None,
) -> CorrectionResult:
    """Correct some sequences of a batch; nothing is raised for log-probs that are not finite.

    ``batch``: statistics of the whole batch, by whose mean weight batch normalisation divides; None: those of
    these sequences. Raises ``ValueError`` when shapes differ or ``context`` lacks advantages that a rule
    needs.
    """
    log_probs, settings = LogProbs(train_log_probs, rollout_log_probs, response_mask), config.settings()
    shape, device = train_log_probs.shape, train_log_probs.device
    context.check(shape)
    weights = None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
    keep_mask = torch.ones(shape, dtype=torch.bool, device=device)
    histogram = torch.zeros(NUM_BINS, dtype=torch.float64, device=device)

    # A call for each chunk: its temporaries are gone before those of the next one come.
    def correct_chunk(chunk: SequenceChunk) -> TokenSums:
        ratio, chunk_context = LogRatio.from_log_probs(log_probs.take(chunk)), context.take(chunk)
        chunk_weights = importance_weights(ratio, settings)
        # Independent of the weights: a rejected token keeps its own.
        rejection = reject_tokens(ratio, settings, chunk_context.advantages)
        if weights is not None and chunk_weights is not None:
            chunk.write(chunk_weights.applied, weights)
        if rejection.causes:
            chunk.write((ratio.response - rejection.kept).bool().logical_not_(), keep_mask)
        if settings.full:
            histogram.add_(log_ratio_histogram(ratio.values, ratio.valid))
        return measure_tokens(ratio, chunk_weights, rejection, chunk_context, settings)

    chunks = sequence_chunks(response_mask)
    # All sequences at once: operations on the few of a chunk would take as long as those on its tokens.
    tokens = join_sequences(list(map(correct_chunk, chunks)), torch.cat([chunk.rows for chunk in chunks]))
    rejection = reject_sequences(tokens, settings)
    statistics = measure_sequences(tokens, rejection, settings, context, log_probs, histogram)
    # Copied to all positions first: on a CPU an operation with a broadcast bool takes ten times as long.
    keep_mask.logical_and_(rejection.kept.bool()[:, None].expand(shape).contiguous())
    if weights is not None and settings.weights is not None and settings.weights.batch_normalize:
        weights.div_(_mean_weight(batch or statistics, settings.weights))
    rejected_rows = (tokens.sequences.response_tokens > 0) & (rejection.kept * tokens.kept_tokens == 0)
    return CorrectionResult(weights, keep_mask, rejected_rows, statistics, config)


@torch.no_grad()
def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: SequenceContext | None = None,
) -> CorrectionStatistics:
    """The statistics of ``correct_sequences`` alone: mergeable, before any rejection. Sequences without
    response tokens never count.

    ``train_log_probs`` ``[B, T]``, nats, are those of the proximal policy (decoupled) or of the current one
    (bypass).
    """
    return correct_sequences(
        train_log_probs,
        rollout_log_probs,
        response_mask,
        _as_config(config),
        context or SequenceContext(),
    ).statistics


def _as_config(config: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    # A model is not checked again: a caller may have changed one field of it on purpose.
    return (
        config
        if isinstance(config, RolloutCorrectionConfig)
        else RolloutCorrectionConfig.model_validate(config)
    )


def _mean_weight(batch: CorrectionStatistics, settings: WeightSettings) -> Tensor:
    """What the batch's weights are divided by: ``rollout_is_batch_norm_factor``, but the number stays on its
    device."""
    level = "sequence" if settings.is_per_row else "token"
    mean = 1.0 + batch.totals().weights[f"applied_{level}"].excess.value
    return torch.where(mean > SMALLEST_NORMALISER, mean, 1.0)


class NonFiniteLogProbError(ValueError):
    """Too many tokens have log-probs that are not finite numbers."""


def require_finite(share: float, config: RolloutCorrectionConfig) -> None:
    """Raise ``NonFiniteLogProbError`` when a larger share of the response tokens than the configuration
    allows is not finite.

    Under ``nonfinite_logprob=raise`` none may be, else the share ``nonfinite_stop_fraction``.
    """
    section = "algorithm.rollout_correction"
    allowed = 0.0 if config.nonfinite_logprob == "raise" else config.nonfinite_stop_fraction
    if share > allowed:
        raise NonFiniteLogProbError(
            f"at most {allowed:.2%} of the response tokens may have a log-prob that is NaN or infinite, got "
            f"{share:.2%}. Corrupt logits are the usual cause: look at the weights and the precision of "
            f"engine and trainer. To go on all the same, raise {section}.nonfinite_stop_fraction (now "
            f"{config.nonfinite_stop_fraction}) under {section}.nonfinite_logprob=reject_sequence."
        )
