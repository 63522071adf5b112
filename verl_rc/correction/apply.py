"""APPLY: weights and keep mask, from log-probs and the statistics of everything that is corrected together."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.diagnostics import correction_metrics
from verl_rc.correction.importance import applied_weights
from verl_rc.correction.log_ratio import log_ratio
from verl_rc.correction.measure import measure
from verl_rc.correction.rejection import keep_mask, rule_statistics
from verl_rc.correction.statistics import CorrectionStatistics


@dataclass(frozen=True)
class CorrectionResult:
    """Rollout correction of one batch."""

    weights: Tensor | None
    """``[B, T]``, constants, 0 outside the response mask; None when ``rollout_is`` is null."""
    keep_mask: Tensor
    """bool ``[B, T]``: what takes part in the loss; True outside the response mask."""
    statistics: CorrectionStatistics
    config: RolloutCorrectionConfig

    def metrics(self) -> dict[str, float]:
        """``rollout_corr/*`` by name; one copy from the device."""
        return correction_metrics(self.statistics, self.config)


def apply(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    statistics: CorrectionStatistics,
) -> tuple[Tensor | None, Tensor]:
    """Weights (or None) and keep mask of some rows, given the statistics of the whole batch they belong to.

    Batch normalisation divides by the batch's mean weight: over tokens at token level, over rows at sequence level.
    """
    ratio = log_ratio(train_log_probs, rollout_log_probs, response_mask, config)
    keep = keep_mask(ratio, rule_statistics(ratio, config))
    if config.rollout_is is None:
        return None, keep
    weights = applied_weights(ratio, config)
    if config.nonfinite_logprob == "neutral":
        weights = torch.where(ratio.response_mask & ~ratio.valid, 1.0, weights)
    if config.rollout_is_batch_normalize:
        name, count = ("is", "tokens") if config.rollout_is == "token" else ("is_row", "rows")
        mean = 1.0 + statistics.sums[f"{name}.sum"] / statistics.sums[count].clamp_min(1)
        weights = weights / torch.where(mean > 1e-8, mean, 1.0).to(weights.dtype)
    return weights, keep


def compute_rollout_correction(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig,
    advantages: Tensor | None = None,
    group_ids: Tensor | None = None,
    policy_versions: Tensor | None = None,
) -> CorrectionResult:
    """Measure and apply rollout correction on a whole batch.

    ``train_log_probs`` and ``rollout_log_probs`` are ``[B, T]`` in nats, ``response_mask`` bool ``[B, T]``. The
    ratio is always
    train over rollout. ``advantages``, ``group_ids`` and ``policy_versions`` serve methods and diagnostics that look
    at them.
    Raises ``ValueError`` when shapes differ, and under ``nonfinite_logprob=raise`` when a log-prob is not finite.
    """
    statistics = measure(train_log_probs, rollout_log_probs, response_mask, config)
    weights, keep = apply(train_log_probs, rollout_log_probs, response_mask, config, statistics)
    return CorrectionResult(weights, keep, statistics, config)
