"""APPLY: weights and keep mask, from log-probs and the statistics of everything that is corrected together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.chunks import RowChunk, RowChunks
from verl_rc.correction.context import RowContext, group_slots, newest_version
from verl_rc.correction.diagnostics import SMALLEST_NORMALISER
from verl_rc.correction.finite import require_finite
from verl_rc.correction.importance import weighted_tokens
from verl_rc.correction.log_ratio import LogRatio, check_shapes, log_ratio, true_per_row
from verl_rc.correction.measure import Sweep, token_level_weights
from verl_rc.correction.rejection import decide_tokens, row_keep
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns, TokenWeights, deciding_columns, join
from verl_rc.correction.statistics import CorrectionStatistics
from verl_rc.correction.weight_statistics import row_level_weights


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
    check_shapes(train_log_probs, rollout_log_probs, response_mask)
    resolved = ResolvedCorrection.of(config)
    context = RowContext(advantages=advantages)
    if resolved.full:
        slots = None if group_ids is None else group_slots(group_ids, train_log_probs.device)
        context = RowContext(slots, policy_versions, current_version, advantages, scores)
    context.check(train_log_probs.shape)
    if context.policy_versions is not None and current_version is None:
        context = replace(context, current_version=newest_version(context.policy_versions, response_mask))
    outputs = _Outputs(train_log_probs, rollout_log_probs, resolved)
    with torch.no_grad():
        sweep = Sweep(resolved, RowChunks.of(response_mask))
        for chunk in sweep.chunks:
            ratio = log_ratio(chunk.of(train_log_probs), chunk.of(rollout_log_probs), chunk.of(response_mask))
            facts = context.of(chunk)
            decision = decide_tokens(ratio, resolved.rules, resolved.config, facts.advantages)
            sweep.add(ratio, decision, facts)
            weights = token_level_weights(ratio, resolved)
            if weights is not None:
                sweep.add_weights(ratio, weights)
            outputs.write(chunk, ratio, decision.keep, weights)
            del ratio, weights, decision  # else two chunks' temporaries live side by side
        statistics = sweep.statistics(context)
        rejected = outputs.finish(sweep.columns(), statistics)
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
    check_shapes(train_log_probs, rollout_log_probs, response_mask)
    resolved = ResolvedCorrection.of(config)
    outputs = _Outputs(train_log_probs, rollout_log_probs, resolved)
    parts: list[Columns] = []
    with torch.no_grad():
        chunks = RowChunks.of(response_mask)
        for chunk in chunks:
            ratio = log_ratio(chunk.of(train_log_probs), chunk.of(rollout_log_probs), chunk.of(response_mask))
            of_chunk = None if advantages is None else chunk.of(advantages)
            keep = decide_tokens(ratio, resolved.rules, resolved.config, of_chunk).keep
            columns = deciding_columns(ratio, resolved.rules, resolved.config)
            columns["token_kept"] = true_per_row(ratio.response_mask if keep is None else ratio.response_mask & keep)
            parts.append(columns)
            outputs.write(chunk, ratio, keep, token_level_weights(ratio, resolved))
            del ratio  # else two chunks' temporaries live side by side
        outputs.finish(join(parts, chunks), statistics)
    return outputs.weights, outputs.keep


class _Outputs:
    """Weights and keep mask, written chunk by chunk and finished in place once all rows are known."""

    def __init__(self, train_log_probs: Tensor, rollout_log_probs: Tensor, resolved: ResolvedCorrection) -> None:
        self._resolved = resolved
        dtype = torch.promote_types(torch.promote_types(train_log_probs.dtype, rollout_log_probs.dtype), torch.float32)
        shape, device = train_log_probs.shape, train_log_probs.device
        has_weights = resolved.threshold is not None
        self.weights = torch.zeros(shape, dtype=dtype, device=device) if has_weights else None
        self.keep = torch.ones(shape, dtype=torch.bool, device=device)

    def write(self, chunk: RowChunk, ratio: LogRatio, keep: Tensor | None, weights: TokenWeights | None) -> None:
        """Token-level weights (or where a row's weight belongs) and the token rules' verdict."""
        if keep is not None:
            chunk.write(keep, self.keep)
        if self.weights is not None:
            written = weighted_tokens(ratio, self._resolved.config) if weights is None else weights.written
            chunk.write(written.to(self.weights.dtype), self.weights)

    def finish(self, columns: Columns, statistics: CorrectionStatistics) -> Tensor:
        """Apply what holds for whole rows, and the batch's normaliser; returns the rejected rows, bool ``[B]``."""
        resolved = self._resolved
        kept_rows = row_keep(columns, resolved.rules, resolved.config)
        self.keep.view(torch.uint8).mul_(kept_rows.view(torch.uint8)[:, None])  # bytes: a CPU is slow with bools
        if self.weights is not None:
            scale = torch.ones_like(columns["tokens"])
            if resolved.has_row_weights:
                scale = row_level_weights(columns, resolved)[1]
            if resolved.config.rollout_is_batch_normalize:
                scale = scale / _normaliser(statistics, resolved.config)
            if resolved.has_row_weights or resolved.config.rollout_is_batch_normalize:
                self.weights *= scale[:, None].to(self.weights.dtype)
        response = columns["response_tokens"]
        return (response > 0) & ~(kept_rows & (columns["token_kept"] > 0))


def _normaliser(statistics: CorrectionStatistics, config: RolloutCorrectionConfig) -> Tensor:
    """The batch's mean weight as a scalar on the device; 1 where that is 0."""
    name, count = ("is_row", "rows") if config.weight_is_per_row else ("is", "tokens")
    mean = 1.0 + statistics.sum_of(f"{name}.sum") / statistics.sum_of(count).clamp_min(1.0)
    return torch.where(mean > SMALLEST_NORMALISER, mean, 1.0)
