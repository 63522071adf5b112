"""APPLY: weights and keep mask, from log-probs and the statistics of everything that is corrected together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.context import RowContext, group_slots, newest_version
from verl_rc.correction.diagnostics import SMALLEST_NORMALISER
from verl_rc.correction.finite import require_finite
from verl_rc.correction.log_ratio import LogProbs
from verl_rc.correction.measure import statistics_of
from verl_rc.correction.outputs import TokenOutputs
from verl_rc.correction.rejection import row_keep
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns
from verl_rc.correction.statistics import CorrectionStatistics
from verl_rc.correction.sweep import sweep


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
    log_probs, resolved = LogProbs(train_log_probs, rollout_log_probs, response_mask), ResolvedCorrection.of(config)
    context = RowContext(advantages=advantages)
    if resolved.full:
        slots = None if group_ids is None else group_slots(group_ids, train_log_probs.device)
        context = RowContext(slots, policy_versions, current_version, advantages, scores)
    context.check(train_log_probs.shape)
    if context.policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(context.policy_versions, response_mask))
    with torch.no_grad():
        outputs = TokenOutputs.like(log_probs, resolved)
        columns, histogram = sweep(log_probs, resolved, context, outputs)
        statistics = statistics_of(columns, histogram, resolved, context)
        rejected = _finish(outputs, columns, statistics, resolved)
    if resolved.config.nonfinite_logprob == "raise":
        require_finite(statistics.metrics(resolved.config), resolved.config)
    return CorrectionResult(outputs.weights, outputs.keep, rejected, statistics, resolved.config)


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
    log_probs, resolved = LogProbs(train_log_probs, rollout_log_probs, response_mask), ResolvedCorrection.of(config)
    context = RowContext(advantages=advantages)
    context.check(train_log_probs.shape)
    with torch.no_grad():
        outputs = TokenOutputs.like(log_probs, resolved)
        columns, _ = sweep(log_probs, resolved, context, outputs, describe=False)
        _finish(outputs, columns, statistics, resolved)
    return outputs.weights, outputs.keep


def _finish(outputs: TokenOutputs, columns: Columns, statistics: CorrectionStatistics, resolved: ResolvedCorrection) -> Tensor:
    """Reject whole rows and divide by the batch's normaliser, in place; returns the rejected rows, bool ``[B]``."""
    kept_rows = row_keep(columns, resolved.rules, resolved.config)
    outputs.keep.view(torch.uint8).mul_(kept_rows.view(torch.uint8)[:, None])  # bytes: a CPU is slow with bools
    if outputs.weights is not None and resolved.config.rollout_is_batch_normalize:
        outputs.weights.div_(_normaliser(statistics, resolved.config))
    response = columns["response_tokens"]
    return (response > 0) & ~(kept_rows & (columns["token_kept"] > 0))


def _normaliser(statistics: CorrectionStatistics, config: RolloutCorrectionConfig) -> Tensor:
    """The batch's mean weight as a scalar on the device; 1 where that is 0."""
    name, count = ("is_row", "rows") if config.weight_is_per_row else ("is", "tokens")
    mean = 1.0 + statistics.sum_of(f"{name}.sum") / statistics.sum_of(count).clamp_min(1.0)
    return torch.where(mean > SMALLEST_NORMALISER, mean, 1.0)
