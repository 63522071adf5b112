"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix, a turn or a sequence,
truncated or cut to a band."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import Threshold
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.tensor_ops import bound_log_ratio


@dataclass(frozen=True)
class Weights:
    """Weights ``w`` of a chunk, stored as ``w - 1`` in float64: exact near 1, where most of them are.

    ``[b, t]`` for levels with a weight per token, 0 where no token is valid; ``[b]`` for levels with a weight
    per sequence.
    """

    logs: Tensor
    """Unbounded logarithms of the raw weights."""
    raw_excess: Tensor
    """``w - 1`` before the threshold."""
    excess: Tensor
    """``w - 1`` after it, before normalisation."""
    applied: Tensor
    """``[b, t]``, in the precision of the log-ratios: ``w`` after the threshold for each token, 0 where none
    counts."""


def importance_weights(ratio: LogRatio, settings: CorrectionSettings) -> Weights | None:
    """``exp`` of a log-weight within ±``LOG_RATIO_BOUND``, then the threshold; None where the configuration
    has no weights.

    Log-weights by level. token: ``l_t``, which corrects the action but not the states. prefix: ``sum_{s<=t}
    l_s``, which corrects both (per-decision importance sampling: Precup, Sutton and Singh 2000). turn: the
    sum over the token's turn, which corrects a turn as one action. sequence: ``sum_t l_t``, the unbiased
    ratio of whole responses. geometric: ``mean_t l_t``, which does not grow with length. Under
    ``nonfinite_logprob=neutral`` a token without a ratio has a weight, too, as if its ratio were 1.
    """
    if settings.weights is None:
        return None
    level, threshold, sums = settings.weights.level, settings.weights.threshold, ratio.sums
    logs = ratio.values
    if level == "prefix":
        # Sums of thousands of terms: float32 would lose the digits of the last ones.
        logs = ratio.values.cumsum(dim=-1, dtype=torch.float64)
    elif level == "turn":
        logs = ratio.turn_sums(ratio.values)
    elif settings.weights.is_per_row:
        logs = sums.log_ratio if level == "sequence" else sums.mean(sums.log_ratio)
    # A sum is bounded, not its terms: single tokens beyond the bound may well make up for each other.
    raw = ratio.excess if level == "token" else torch.expm1(bound_log_ratio(logs))
    excess = bounded_excess(raw, threshold)
    weighted = ratio.response if settings.nonfinite == "neutral" else ratio.valid
    applied = (1.0 + excess).to(weighted.dtype)
    if settings.weights.is_per_row:
        return Weights(logs, raw, excess, applied[:, None] * weighted)
    applied.mul_(weighted)
    # Where no token is valid, prefixes and turns run on, and bounds without 1 in them leave another weight.
    if level != "token":
        logs, raw = logs * ratio.valid, raw * ratio.valid
    if level != "token" or not threshold.keeps_one:
        excess = excess * ratio.valid
    return Weights(logs, raw, excess, applied)


def bounded_excess(excess: Tensor, threshold: Threshold) -> Tensor:
    """``w - 1`` after truncation ``min(w, upper)`` (Ionides 2008), or in the band of IcePop
    (arXiv:2510.18855), from ``w - 1``.

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return excess.clamp_max(threshold.upper - 1.0)
    inside = (excess >= threshold.lower - 1.0) & (excess <= threshold.upper - 1.0)
    return excess.masked_fill(~inside, -1.0)
