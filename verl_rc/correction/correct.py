"""Measure the statistics of some sequences, apply weights and rejection to them, or do both for a whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.rejection import Rejection, find_rejected
from verl_rc.correction.sequences import LogProbs, SequenceChunk, SequenceContext, newest_version, sequence_chunks
from verl_rc.correction.statistics import CorrectionStatistics, log_ratio_histograms, sequence_totals
from verl_rc.correction.totals import Totals, map_totals
from verl_rc.correction.weights import Weights, importance_weights, with_prompts
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
    settings, outputs = config.settings(), _Outputs(log_probs, config.settings())
    statistics = _correct(log_probs, settings, context, outputs)
    if config.nonfinite_logprob == "raise":
        require_finite(statistics.metrics(config), config)
    weights = outputs.normalised_weights(statistics, settings)
    return CorrectionResult(weights, outputs.keep_mask(), outputs.rejected_rows, statistics, config)


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
    with torch.no_grad():
        for chunk in sequence_chunks(response_mask):
            ratio = LogRatio.from_log_probs(log_probs.take(chunk))
            rejection = find_rejected(ratio, settings, context.take(chunk).advantages)
            outputs.write(chunk, ratio, rejection, importance_weights(ratio, settings))
    return outputs.normalised_weights(statistics, settings), outputs.keep_mask()


def _as_config(given: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    return given if isinstance(given, RolloutCorrectionConfig) else RolloutCorrectionConfig.model_validate(given)


def _correct(
    log_probs: LogProbs, settings: CorrectionSettings, context: SequenceContext, outputs: "_Outputs | None" = None
) -> CorrectionStatistics:
    """Statistics of all sequences; ``outputs`` collects what the loss needs."""

    # A call for each chunk: its temporaries are gone before those of the next one come.
    def correct_chunk(chunk: SequenceChunk) -> tuple[Totals[Tensor], Tensor]:
        ratio, facts = LogRatio.from_log_probs(log_probs.take(chunk)), context.take(chunk)
        # Independent of each other: a rejected token keeps its weight, and statistics are those before rejection.
        rejection, weights = find_rejected(ratio, settings, facts.advantages), importance_weights(ratio, settings)
        if outputs is not None:
            outputs.write(chunk, ratio, rejection, weights)
        counts = log_ratio_histograms(ratio) if settings.full else ratio.sums.new_zeros(0)
        return sequence_totals(ratio, rejection, weights, settings, facts), counts

    with torch.no_grad():
        chunks = sequence_chunks(log_probs.response_mask)
        parts = [correct_chunk(chunk) for chunk in chunks]
        totals = map_totals(lambda *columns, is_extreme: torch.cat(columns), *(rows for rows, _ in parts))
        if totals.weights is not None and context.group_slots is not None:
            slots = context.group_slots[torch.cat([chunk.rows for chunk in chunks])]
            totals = replace(totals, weights=with_prompts(totals.weights, slots))
        return CorrectionStatistics.from_sequences(totals, torch.stack([counts for _, counts in parts]).sum(dim=0))


class _Outputs:
    """Weights and masks for the loss, written chunk by chunk."""

    def __init__(self, log_probs: LogProbs, settings: CorrectionSettings) -> None:
        shape, device = log_probs.train.shape, log_probs.train.device
        self.rejected_rows = torch.zeros(shape[:1], dtype=torch.bool, device=device)
        self._weights = None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
        self._keep_tokens = torch.ones(shape, dtype=torch.bool, device=device)
        self._keep_rows = torch.ones_like(self.rejected_rows)

    def write(self, chunk: SequenceChunk, ratio: LogRatio, rejection: Rejection, weights: Weights | None) -> None:
        """Write those of one chunk."""
        rejected = (ratio.response_tokens > 0) & (rejection.kept == 0)
        self.rejected_rows.index_copy_(0, chunk.rows, rejected)
        self._keep_rows.index_copy_(0, chunk.rows, rejection.keep_rows)
        if rejection.tokens:
            chunk.write((ratio.response - rejection.keep_tokens).bool().logical_not_(), self._keep_tokens)
        if weights is not None and self._weights is not None:
            chunk.write(weights.applied, self._weights)

    def keep_mask(self) -> Tensor:
        """bool ``[B, T]``; rows are rejected with the padding that no chunk reaches."""
        return self._keep_rows[:, None].expand_as(self._keep_tokens).contiguous().logical_and_(self._keep_tokens)

    def normalised_weights(self, statistics: CorrectionStatistics, settings: CorrectionSettings) -> Tensor | None:
        """``[B, T]``, divided by the batch's mean weight where that was asked for; None: there are none."""
        if self._weights is None or settings.weights is None or not settings.weights.batch_normalize:
            return self._weights
        of_batch = statistics.totals().weights
        assert of_batch is not None
        excess = (of_batch.applied.rows if settings.weights.is_per_row else of_batch.applied.tokens).excess
        mean = 1.0 + excess.total / excess.count.clamp_min(1.0)
        # As in ``rollout_is_batch_norm_factor``, but the number stays on its device.
        return self._weights.div_(torch.where(mean > SMALLEST_NORMALISER, mean, 1.0))


class NonFiniteLogProbError(ValueError):
    """Too many tokens have log-probs that are not finite numbers."""


def require_finite(metrics: Mapping[str, float], config: RolloutCorrectionConfig) -> None:
    """Raise ``NonFiniteLogProbError`` when more log-probs than the configuration allows are NaN or infinite.

    ``metrics`` are those of a correction. Under ``nonfinite_logprob=raise`` none is allowed, else the share
    ``nonfinite_stop_fraction`` of the response tokens.
    """
    section = "algorithm.rollout_correction"
    allowed = 0.0 if config.nonfinite_logprob == "raise" else config.nonfinite_stop_fraction
    share = metrics["rollout_corr/nonfinite_token_fraction"]
    if share > allowed:
        raise NonFiniteLogProbError(
            f"at most {allowed:.2%} of the response tokens may have a log-prob that is NaN or infinite, got {share:.2%}. "
            "Corrupt logits are the usual cause: look at the weights and the precision of engine and trainer. To go on all the "
            f"same, raise {section}.nonfinite_stop_fraction (now {config.nonfinite_stop_fraction}) under "
            f"{section}.nonfinite_logprob=reject_sequence."
        )
