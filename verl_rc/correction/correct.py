"""MEASURE what the metrics need to know about some rows, APPLY weights and rejection to them, or both for a whole batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.histogram import NUM_BINS, log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio, row_sum
from verl_rc.correction.metrics import SMALLEST_NORMALISER
from verl_rc.correction.rejection import Verdict, judge, row_statistics
from verl_rc.correction.rows import LogProbs, RowChunk, RowContext, newest_version, row_chunks
from verl_rc.correction.statistics import CorrectionStatistics, RowColumns, completed, token_totals
from verl_rc.correction.totals import map_totals
from verl_rc.correction.weights import importance_weights
from verl_rc.tensor_ops.masked import group_numbers


@dataclass(frozen=True)
class CorrectionResult:
    """Rollout correction of one batch."""

    weights: Tensor | None
    """``[B, T]``, constants, 0 outside the response mask; None when ``rollout_is`` is null."""
    keep_mask: Tensor
    """bool ``[B, T]``: what takes part in the policy loss; True on padding of rows that are not rejected as a whole."""
    rejected_rows: Tensor
    """bool ``[B]``: rows with response tokens of which none is kept."""
    statistics: CorrectionStatistics
    """What was measured, before rejection."""
    config: RolloutCorrectionConfig
    """What was asked for."""

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
) -> CorrectionResult:
    """Measure and apply rollout correction on a whole batch.

    ``train_log_probs`` and ``rollout_log_probs`` are ``[B, T]`` in nats, ``response_mask`` is ``[B, T]``; the ratio is always
    train over rollout. ``advantages`` ``[B, T]`` serve rules that look at their sign and, like all that follows,
    ``diagnostics=full``: ``group_ids`` (an id of its prompt for each row), ``policy_versions`` int ``[B, T]`` or ``[B]`` (ages
    count from ``current_version``, else from the newest one), outcome ``scores`` ``[B]`` (above 0: correct). Raises
    ``ValueError`` when shapes differ or advantages are missing, and under ``nonfinite_logprob=raise`` when a log-prob is not
    finite. ``config`` may be a mapping of fields.
    """
    log_probs, config = LogProbs(train_log_probs, rollout_log_probs, response_mask), _as_config(config)
    context = RowContext(advantages=advantages)
    if config.diagnostics == "full":
        slots = None if group_ids is None else group_numbers(group_ids, train_log_probs.device)
        context = RowContext(slots, policy_versions, current_version, advantages, scores)
    context.check(train_log_probs.shape)
    if context.policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(context.policy_versions, response_mask))
    statistics, outputs = _correct(log_probs, config.settings(), context, measures=True, applies=True)
    assert statistics is not None
    assert outputs is not None
    if config.nonfinite_logprob == "raise":
        require_finite(statistics.metrics(config), config)
    weights = _normalised(outputs.weights, statistics, config.settings())
    return CorrectionResult(weights, outputs.keep_mask, outputs.rejected_rows, statistics, config)


def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: RowContext | None = None,
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats), before any rejection. Rows without response tokens never count.

    ``train_log_probs`` are those of the proximal policy (decoupled) or of the current one (bypass). Raises ``ValueError`` when
    shapes differ or ``context`` misses advantages that a rule looks at.
    """
    log_probs, context = LogProbs(train_log_probs, rollout_log_probs, response_mask), context or RowContext()
    context.check(train_log_probs.shape)
    statistics, _ = _correct(log_probs, _as_config(config).settings(), context, measures=True, applies=False)
    assert statistics is not None
    return statistics


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
    ``[B, T]`` are needed by rules that look at their sign. Raises ``ValueError`` when shapes differ or advantages are missing.
    """
    log_probs, settings = LogProbs(train_log_probs, rollout_log_probs, response_mask), _as_config(config).settings()
    context = RowContext(advantages=advantages)
    context.check(train_log_probs.shape)
    _, outputs = _correct(log_probs, settings, context, measures=False, applies=True)
    assert outputs is not None
    return _normalised(outputs.weights, statistics, settings), outputs.keep_mask


def _as_config(given: RolloutCorrectionConfig | Mapping[str, object]) -> RolloutCorrectionConfig:
    return given if isinstance(given, RolloutCorrectionConfig) else RolloutCorrectionConfig.model_validate(given)


def _correct(
    log_probs: LogProbs, settings: CorrectionSettings, context: RowContext, *, measures: bool, applies: bool
) -> tuple[CorrectionStatistics | None, "_Outputs | None"]:
    """Statistics if asked to measure, outputs if asked to apply: what needs the tokens a few rows at a time."""
    outputs, parts = _Outputs(log_probs, settings) if applies else None, []
    histogram = torch.zeros(NUM_BINS, dtype=torch.float64, device=log_probs.train.device)
    with torch.no_grad():
        for chunk in row_chunks(log_probs.response_mask):
            ratio, facts = LogRatio.from_log_probs(log_probs.of(chunk)), context.of(chunk)
            statistics = row_statistics(ratio, settings)
            verdict = judge(ratio, settings, statistics, facts.advantages)
            weights, applied = None, None
            if settings.weights is not None:
                weights, applied = importance_weights(ratio, settings.weights, neutral=settings.nonfinite == "neutral")
            if measures:
                facts_of_rows = (row_sum(ratio.train), verdict.kept, statistics, facts.scores, facts.group_slots)
                parts.append((token_totals(ratio, verdict, weights, settings, facts), RowColumns(ratio.rows, *facts_of_rows)))
                histogram += log_ratio_histogram(ratio.values, ratio.ones) if settings.full else 0.0
            if outputs is not None:
                outputs.write(chunk, verdict, applied)
            del ratio, verdict, weights, applied  # else they live on beside those of the next rows
        if outputs is not None:
            outputs.reject_rows()
        if not measures:
            return None, outputs
        totals, columns = map_totals(lambda *some, is_extreme: torch.cat(some), *parts)
        logs = (columns.sums.log_ratio, columns.sums.mean(columns.sums.log_ratio)) if settings.full else ()
        histograms = [histogram] * settings.full + [log_ratio_histogram(of_rows, columns.sums.real) for of_rows in logs]
        return CorrectionStatistics.from_rows(completed(totals, columns, settings), histograms), outputs


class _Outputs:
    """What the loss takes."""

    def __init__(self, log_probs: LogProbs, settings: CorrectionSettings) -> None:
        shape, device = log_probs.train.shape, log_probs.train.device
        self.weights = None if settings.weights is None else torch.zeros(shape, dtype=log_probs.dtype, device=device)
        self.keep_mask = torch.ones(shape, dtype=torch.bool, device=device)
        self.rejected_rows = torch.zeros(shape[:1], dtype=torch.bool, device=device)
        self._keep_rows = torch.ones_like(self.rejected_rows)

    def write(self, chunk: RowChunk, verdict: Verdict, weights: Tensor | None) -> None:
        """Those of some rows; ``reject_rows`` comes after the last."""
        self._keep_rows.index_copy_(0, chunk.rows, verdict.keep_rows.bool())
        self.rejected_rows.index_copy_(0, chunk.rows, verdict.rejected_rows)
        if verdict.keep_tokens is not None:
            chunk.write(verdict.keep_tokens.bool(), self.keep_mask)
        if weights is not None and self.weights is not None:
            chunk.write(weights, self.weights)

    def reject_rows(self) -> None:
        """As a whole, with the padding that no chunk reaches."""
        # Written out first: a CPU takes ten times as long with a column of bools that is only thought to be as wide as the mask.
        self.keep_mask &= self._keep_rows[:, None].expand(self.keep_mask.shape).contiguous()


def _normalised(weights: Tensor | None, statistics: CorrectionStatistics, settings: CorrectionSettings) -> Tensor | None:
    """Divided by the batch's mean weight where that was asked for, in place."""
    if weights is None or settings.weights is None or not settings.weights.batch_normalize:
        return weights
    of_batch = statistics.totals().weights
    assert of_batch is not None
    excess = (of_batch.rows if settings.weights.is_per_row else of_batch.tokens).excess
    mean = 1.0 + excess.total / excess.count.clamp_min(1.0)
    # As ``normaliser`` of the metrics, but the number stays on its device.
    return weights.div_(torch.where(mean > SMALLEST_NORMALISER, mean, 1.0))


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
