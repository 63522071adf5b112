"""Measure the statistics of some sequences, apply weights and rejection to them, or do both for a whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.histogram import log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.rejection import Rejection, reject_sequences, reject_tokens
from verl_rc.correction.sequences import LogProbs, SequenceChunk, SequenceContext, newest_version, sequence_chunks
from verl_rc.correction.statistics import CorrectionStatistics, sequence_totals, token_sums
from verl_rc.correction.totals import TokenSums, map_totals
from verl_rc.correction.weights import Weights, importance_weights
from verl_rc.tensor_ops.masked import group_numbers


@dataclass(frozen=True)
class CorrectionResult:
    """Rollout correction of one batch."""

    weights: Tensor | None
    """``[B, T]``, constants, 0 outside the response mask; None when ``rollout_is`` is null."""
    keep_mask: Tensor
    """bool ``[B, T]``: what takes part in the policy loss; True on padding of rows that are not rejected as a whole."""
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
    current_version: int | None = None,
    by_age: bool = False,
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
        policy_versions: int ``[B, T]`` or ``[B]``; read with ``diagnostics=full`` or ``by_age``.
        scores: ``[B]``, above 0 is correct; read with ``diagnostics=full``.
        current_version: Version from which ages count; None: the newest of ``policy_versions``.
        by_age: Measure by token age with any diagnostics.

    Raises:
        ValueError: Shapes differ, advantages are missing, or a log-prob is not finite under ``nonfinite_logprob=raise``.
    """
    log_probs, config = LogProbs(train_log_probs, rollout_log_probs, response_mask), _as_config(config)
    context = SequenceContext(advantages=advantages)
    if config.diagnostics == "full":
        slots = None if group_ids is None else group_numbers(group_ids, train_log_probs.device)
        context = replace(context, group_slots=slots, scores=scores)
    if config.diagnostics == "full" or by_age:
        context = replace(context, policy_versions=policy_versions, current_version=current_version)
    context.check(train_log_probs.shape)
    if context.policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(context.policy_versions, response_mask))
    settings = config.settings()
    outputs = _Outputs(log_probs, settings)
    statistics = _correct(log_probs, settings, context, outputs)
    if config.nonfinite_logprob == "raise":
        require_finite(statistics.nonfinite_fraction, config)
    weights = outputs.normalised_weights(statistics)
    return CorrectionResult(weights, outputs.keep_mask, outputs.rejected_rows, statistics, config)


def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: SequenceContext | None = None,
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats), before any rejection. Rows without response tokens never count.

    ``train_log_probs`` are those of the proximal policy (decoupled) or of the current one (bypass). Raises ``ValueError`` when
    shapes differ or ``context`` lacks advantages that a rule needs.
    """
    log_probs, context = LogProbs(train_log_probs, rollout_log_probs, response_mask), context or SequenceContext()
    context.check(train_log_probs.shape)
    return _correct(log_probs, _as_config(config).settings(), context)


def apply(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    statistics: CorrectionStatistics,
    advantages: Tensor | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Weights (or None) and keep mask of some rows, given the statistics of the whole batch they belong to.

    Batch normalisation divides by the batch's mean weight: over tokens, or over rows where a row has one weight. ``advantages``
    ``[B, T]`` are needed by rules that depend on their sign. Raises ``ValueError`` when shapes differ or advantages are missing.
    """
    log_probs, settings = LogProbs(train_log_probs, rollout_log_probs, response_mask), _as_config(config).settings()
    context, outputs = SequenceContext(advantages=advantages), _Outputs(log_probs, settings)
    context.check(train_log_probs.shape)
    _correct(log_probs, replace(settings, full=False), context, outputs)
    return outputs.normalised_weights(statistics), outputs.keep_mask


def _as_config(given: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    return given if isinstance(given, RolloutCorrectionConfig) else RolloutCorrectionConfig.model_validate(given)


def _correct(
    log_probs: LogProbs, settings: CorrectionSettings, context: SequenceContext, outputs: "_Outputs | None" = None
) -> CorrectionStatistics:
    """Statistics of all sequences; ``outputs`` collects what the loss needs."""
    histogram: list[Tensor] = []

    # A call for each chunk: its temporaries are gone before those of the next one come.
    def correct_chunk(chunk: SequenceChunk) -> TokenSums[Tensor]:
        ratio, facts, weights = LogRatio.from_log_probs(log_probs.take(chunk)), context.take(chunk), None
        # Independent of each other: a rejected token keeps its weight, and statistics are those before rejection.
        rejection, rules = reject_tokens(ratio, settings, facts.advantages)
        if settings.weights is not None:
            # Under ``neutral`` a token without a ratio is weighed, too, as if its ratio were 1.
            weighted = ratio.response if settings.nonfinite == "neutral" else ratio.ones
            weights = importance_weights(ratio, settings.weights, weighted)
        if outputs is not None:
            outputs.write(chunk, ratio.response, rejection, weights)
        if settings.full:
            histogram.append(log_ratio_histogram(ratio.values, ratio.ones))
        return token_sums(ratio, rejection, rules, weights, settings, facts)

    with torch.no_grad():
        chunks = sequence_chunks(log_probs.response_mask)
        parts = [correct_chunk(chunk) for chunk in chunks]
        place = torch.cat([chunk.rows for chunk in chunks]).argsort()
        found = map_totals(lambda *columns, is_extreme: torch.cat(columns).index_select(0, place), *parts)
        # One pass for all sequences: operations on a chunk's few would take as long as those on its tokens.
        rejection, sums = reject_sequences(found, settings), found.sums
        if outputs is not None:
            outputs.reject(rejection.kept, found)
        totals, histograms = sequence_totals(found, rejection, settings, context), []
        if settings.full:
            logs = sums.log_ratio, sums.mean(sums.log_ratio)
            histograms = [torch.stack(histogram).sum(dim=0), *(log_ratio_histogram(some, sums.real) for some in logs)]
        return CorrectionStatistics.from_sequences(totals, histograms)


class _Outputs:
    """Weights and masks for the loss: of tokens chunk by chunk, of sequences at the end."""

    def __init__(self, log_probs: LogProbs, settings: CorrectionSettings) -> None:
        shape, device = log_probs.train.shape, log_probs.train.device
        self._settings = settings.weights
        self._weights = None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
        self.keep_mask = torch.ones(shape, dtype=torch.bool, device=device)
        self.rejected_rows = torch.zeros(shape[:1], dtype=torch.bool, device=device)

    def write(self, chunk: SequenceChunk, response: Tensor, rejection: Rejection, weights: Weights | None) -> None:
        """Write those of one chunk."""
        if rejection.causes:
            chunk.write((response - rejection.kept).bool().logical_not_(), self.keep_mask)
        if weights is not None and self._weights is not None:
            chunk.write(weights.applied, self._weights)

    def reject(self, kept: Tensor, found: TokenSums[Tensor]) -> None:
        """Reject the sequences that are not ``kept`` as a whole, with the padding that no chunk reaches."""
        # Copied to all positions first: on a CPU an operation with a broadcast bool takes ten times as long.
        self.keep_mask.logical_and_(kept.bool()[:, None].expand_as(self.keep_mask).contiguous())
        self.rejected_rows = (found.sums.response_tokens > 0) & (kept * found.kept == 0)

    def normalised_weights(self, statistics: CorrectionStatistics) -> Tensor | None:
        """``[B, T]``, divided by the batch's mean weight where that was asked for; None: there are none."""
        if self._weights is None or self._settings is None or not self._settings.batch_normalize:
            return self._weights
        of_batch = statistics.totals().weights
        assert of_batch is not None
        excess = (of_batch.applied.rows if self._settings.is_per_row else of_batch.applied.tokens).excess
        mean = 1.0 + excess.total / excess.count.clamp_min(1.0)
        # As in ``rollout_is_batch_norm_factor``, but the number stays on its device.
        return self._weights.div_(torch.where(mean > SMALLEST_NORMALISER, mean, 1.0))


class NonFiniteLogProbError(ValueError):
    """Too many tokens have log-probs that are not finite numbers."""


def require_finite(share: float, config: RolloutCorrectionConfig) -> None:
    """Raise ``NonFiniteLogProbError`` when a larger share of the response tokens than the configuration allows is not finite.

    Under ``nonfinite_logprob=raise`` none may be, else the share ``nonfinite_stop_fraction``.
    """
    section = "algorithm.rollout_correction"
    allowed = 0.0 if config.nonfinite_logprob == "raise" else config.nonfinite_stop_fraction
    if share > allowed:
        raise NonFiniteLogProbError(
            f"at most {allowed:.2%} of the response tokens may have a log-prob that is NaN or infinite, got {share:.2%}. "
            "Corrupt logits are the usual cause: look at the weights and the precision of engine and trainer. To go on all the "
            f"same, raise {section}.nonfinite_stop_fraction (now {config.nonfinite_stop_fraction}) under "
            f"{section}.nonfinite_logprob=reject_sequence."
        )
