"""Measure the statistics of some sequences, apply weights and rejection to them, or do both for a whole
batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig, WeightSettings
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.rejection import SequenceEvidence, reject_sequences, reject_tokens
from verl_rc.correction.sequences import (
    LogProbs,
    SequenceChunk,
    SequenceContext,
    newest_version,
    sequence_chunks,
)
from verl_rc.correction.statistics import (
    CorrectionStatistics,
    Measured,
    measure_sequences,
    measure_tokens,
)
from verl_rc.correction.totals import join_sequences
from verl_rc.correction.weights import importance_weights
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
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    result = _correct(log_probs, config, context)
    if config.nonfinite_logprob == "raise":
        require_finite(result.statistics.nonfinite_fraction, config)
    return result


def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: SequenceContext | None = None,
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats), before any rejection. Sequences without response
    tokens never count.

    ``train_log_probs`` are those of the proximal policy (decoupled) or of the current one (bypass). Raises
    ``ValueError`` when shapes differ or ``context`` lacks advantages that a rule needs.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    return _correct(log_probs, _as_config(config), context or SequenceContext()).statistics


def apply(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    statistics: CorrectionStatistics,
    advantages: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Weights (or None) and keep mask of some sequences, given the statistics of the whole batch they belong
    to.

    Batch normalisation divides by the batch's mean weight: over tokens, or sequences where each has one.
    ``advantages`` ``[B, T]`` are needed by rules that depend on their sign. Raises ``ValueError`` when shapes
    differ or advantages are missing.
    """
    log_probs = LogProbs(train_log_probs, rollout_log_probs, response_mask)
    context = SequenceContext(advantages=advantages)
    result = _correct(log_probs, _as_config(config), context, statistics)
    return result.weights, result.keep_mask


def _as_config(config: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    # A model is not checked again: a caller may have changed one field of it on purpose.
    return (
        config
        if isinstance(config, RolloutCorrectionConfig)
        else RolloutCorrectionConfig.model_validate(config)
    )


def _correct(
    log_probs: LogProbs,
    config: RolloutCorrectionConfig,
    context: SequenceContext,
    batch: CorrectionStatistics | None = None,
) -> CorrectionResult:
    """From log-probs to weights and keep mask: THE PAGE of rollout correction.

    The sequences belong to a ``batch`` with these statistics; without one they are the batch, and are
    measured.
    """
    settings, shape, device = config.settings(), log_probs.train.shape, log_probs.train.device
    context.check(shape)
    applied = None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
    keep_mask = torch.ones(shape, dtype=torch.bool, device=device)
    evidence, measured = list[SequenceEvidence](), list[Measured]()

    # A call for each chunk: its temporaries are gone before those of the next one come.
    def correct_chunk(chunk: SequenceChunk) -> None:
        ratio, facts = LogRatio.from_log_probs(log_probs.take(chunk)), context.take(chunk)
        # Independent of each other: what is rejected keeps its weight.
        weights = importance_weights(ratio, settings)
        tokens = reject_tokens(ratio, settings, facts.advantages)
        if weights is not None and applied is not None:
            chunk.write(weights.applied, applied)
        if tokens.causes:
            chunk.write((ratio.response - tokens.kept).bool().logical_not_(), keep_mask)
        if batch is None:  # statistics are those before rejection
            measured.append(measure_tokens(ratio, weights, tokens, settings, facts))
        evidence.append(SequenceEvidence.from_tokens(ratio, tokens, settings))

    with torch.no_grad():
        chunks = sequence_chunks(log_probs.response_mask)
        for chunk in chunks:
            correct_chunk(chunk)
        # At once: operations on the few sequences of a chunk would take as long as those on its tokens.
        rows = torch.cat([chunk.rows for chunk in chunks])
        whole = join_sequences(evidence, rows)
        sequences = reject_sequences(whole, settings)
        # Copied to all positions first: on a CPU an operation with a broadcast bool takes ten times as long.
        keep_mask.logical_and_(sequences.kept.bool()[:, None].expand(shape).contiguous())
        rejected_rows = (whole.sums.response_tokens > 0) & (sequences.kept * whole.kept_tokens == 0)
        statistics = batch or measure_sequences(
            measured, rows, whole, sequences, settings, context, log_probs
        )
        if applied is not None and settings.weights is not None and settings.weights.batch_normalize:
            applied.div_(_mean_weight(statistics, settings.weights))
    return CorrectionResult(applied, keep_mask, rejected_rows, statistics, config)


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
