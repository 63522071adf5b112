"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix or a sequence, truncated or cut to a band."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rollout_correction import CorrectionSettings, WeightSettings
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.rejection import Means
from verl_rc.correction.totals import Mean, Moments, WeightLevels, WeightSums, WeightTotals
from verl_rc.tensor_ops import bound_log_ratio


@dataclass(frozen=True)
class Weights:
    """Weights ``w`` of a chunk, stored as ``w - 1`` in float64: exact near 1, where most of them are.

    ``[b, t]`` for levels with a weight per token, 0 where no token is valid; ``[b]`` for levels with a weight per sequence.
    """

    logs: Tensor
    """Unbounded logarithms of the raw weights."""
    raw_excess: Tensor
    """``w - 1`` before the threshold."""
    excess: Tensor
    """``w - 1`` after it, before normalisation."""
    applied: Tensor
    """``[b, t]``, in the precision of the log-ratios: ``w`` after the threshold for each token, 0 where none counts."""


def importance_weights(ratio: LogRatio, settings: CorrectionSettings) -> Weights | None:
    """``exp`` of a log-weight within ±``LOG_RATIO_BOUND``, then the threshold; None: no weights. Log-weights by level:

    token: ``l_t``, which corrects the action but not the states. prefix: ``sum_{s<=t} l_s``, which corrects both (per-decision
    importance sampling: Precup, Sutton and Singh 2000). sequence: ``sum_t l_t``, the unbiased ratio of whole responses.
    geometric: ``mean_t l_t``, which does not grow with length. Under ``nonfinite_logprob=neutral`` response tokens that are not
    valid get a weight, too, as if their ratio were 1.
    """
    if settings.weights is None:
        return None
    level, threshold, dtype = settings.weights.level, settings.weights.threshold, ratio.values.dtype
    weighted = ratio.response if settings.nonfinite == "neutral" else ratio.ones
    if settings.weights.is_per_row:
        logs = ratio.sums if level == "sequence" else ratio.mean(ratio.sums)
        # The sum is bounded, not its terms: single tokens beyond the bound may well make up for each other.
        raw = torch.expm1(bound_log_ratio(logs))
        excess = bounded_excess(raw, threshold)
        return Weights(logs, raw, excess, (1.0 + excess).to(dtype)[:, None] * weighted)
    logs, raw = ratio.values, ratio.excess
    if level == "prefix":
        # Sums of thousands of terms: float32 would lose the digits of the last ones.
        logs = ratio.values.cumsum(dim=-1, dtype=torch.float64)
        raw = torch.expm1(bound_log_ratio(logs))
    excess = bounded_excess(raw, threshold)
    applied = (1.0 + excess).to(dtype).mul_(weighted)
    # Where no token is valid, prefixes run on, and bounds without 1 in them leave another weight.
    if level == "prefix":
        logs, raw = logs * ratio.ones, raw * ratio.ones
    if level == "prefix" or not threshold.keeps_one:
        excess = excess * ratio.ones
    return Weights(logs, raw, excess, applied)


def bounded_excess(excess: Tensor, threshold: Threshold) -> Tensor:
    """``w - 1`` after truncation ``min(w, upper)`` (Ionides 2008), or in the band of IcePop (arXiv:2510.18855), from ``w - 1``.

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return excess.clamp_max(threshold.upper - 1.0)
    inside = (excess >= threshold.lower - 1.0) & (excess <= threshold.upper - 1.0)
    return excess.masked_fill(~inside, -1.0)


def weight_totals(
    weights: Weights, settings: WeightSettings, ratio: LogRatio, *, full: bool
) -> tuple[WeightTotals[Tensor], Means]:
    """What each sequence adds to the weights' statistics, and to the metrics that are shares."""
    threshold, tokens, real = settings.threshold, ratio.tokens, ratio.real
    applied = _levels(weights.excess, ratio)
    raw = _levels(weights.raw_excess, ratio) if full or settings.is_per_row else None
    row_raw = weights.raw_excess if settings.is_per_row else ratio.mean(sequence_sum(weights.raw_excess))
    rows_high, rows_low = real * (row_raw > threshold.upper - 1.0), real * (row_raw < threshold.reciprocal_lower - 1.0)
    if settings.is_per_row:
        high, low, judged, outside = rows_high, rows_low, real, tokens * (rows_high + rows_low)
    else:
        # Logarithms are compared, not weights: they are known beyond the safety bound, too.
        high = ratio.count(indicator(torch.gt, weights.logs, math.log(threshold.upper)))
        low = ratio.count(indicator(torch.lt, weights.logs, math.log(threshold.reciprocal_lower)))
        judged, outside = tokens, high + low
    means = {
        "rollout_is_ratio_fraction_high": Mean(high, judged),
        "rollout_is_ratio_fraction_low": Mean(low, judged),
        "rollout_is_seq_fraction_high": Mean(rows_high, real),
        "rollout_is_seq_fraction_low": Mean(rows_low, real),
    }
    if threshold.lower is not None:
        means["rollout_is_oob_ratio"] = Mean(outside, tokens)
    return WeightTotals(applied, raw), means


def _levels(excess: Tensor, ratio: LogRatio) -> WeightLevels[Tensor]:
    """What each sequence adds. ``excess`` is ``w - 1``: ``[b, t]``, or ``[b]`` with one weight per sequence."""
    if excess.ndim == 1:
        return WeightLevels(_sums_of_sequences(excess, ratio.tokens), _sums_of_sequences(excess, ratio.real))
    tokens = sums_of_tokens(excess, ratio.ones, ratio.tokens)
    return WeightLevels(tokens, _sums_of_sequences(ratio.mean(tokens.excess.total), ratio.real))


def sums_of_tokens(excess: Tensor, ones: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds. ``excess`` is ``w - 1`` of the ``count`` tokens where ``ones`` is 1, and 0 where it is 0."""
    w = excess + ones
    moments = Moments(sequence_sum(excess), count, vecdot(excess, excess))
    return WeightSums(moments, vecdot(w, w), extremes(w.to(ones.dtype), ones))


def _sums_of_sequences(excess: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds, with ``w - 1 = excess`` ``[B]`` counted ``count`` ``[B]`` times."""
    w = excess + 1.0
    moments = Moments(count * excess, count, count * excess.square())
    return WeightSums(moments, count * w.square(), extremes(w, count))


def with_prompts(weights: WeightTotals[Tensor], group_slots: Tensor) -> WeightTotals[Tensor]:
    """Add the level of prompts, ``[B]``: a prompt's weight is the mean over its sequences with valid tokens."""

    def of_prompts(levels: WeightLevels[Tensor]) -> WeightLevels[Tensor]:
        rows = levels.rows.excess
        count, total = (torch.zeros_like(column).index_add_(0, group_slots, column) for column in (rows.count, rows.total))
        return replace(levels, prompts=_sums_of_sequences(total / count.clamp_min(1.0), count.clamp_max(1.0)))

    return WeightTotals(of_prompts(weights.applied), None if weights.raw is None else of_prompts(weights.raw))
