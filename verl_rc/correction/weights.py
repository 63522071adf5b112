"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix or a sequence, truncated or cut to a band."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rollout_correction import WeightSettings
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, RowSums, row_sum
from verl_rc.correction.rejection import Means
from verl_rc.correction.totals import Extremes, Mean, Moments, WeightSums, WeightTotals


@dataclass(frozen=True)
class Weights:
    """Weights ``w`` of some rows as ``w - 1``, float64: exact near 1, where most of them are.

    ``[b, t]``, and 0 where no token is valid, for levels at which every token has a weight; ``[b]`` for those at which all tokens
    of a row share one.
    """

    logs: Tensor
    """Unbounded logarithms of the raw weights."""
    raw_excess: Tensor
    """``w - 1`` before the threshold."""
    excess: Tensor
    """``w - 1`` after it, before normalisation."""


def importance_weights(ratio: LogRatio, settings: WeightSettings, *, neutral: bool) -> tuple[Weights, Tensor]:
    """token: ``exp(l_t)``, which corrects the action but not the states; prefix: ``exp(sum_{s<=t} l_s)``, which corrects both
    (per-decision importance sampling: Precup, Sutton and Singh 2000); else ``shared_weights``. Log-weights are bounded by ±20.

    And what is applied to tokens ``[b, t]``; if ``neutral`` to response tokens that are not valid, too, as if their ratio were 1.
    """
    weighted, ones, dtype = ratio.response if neutral else ratio.ones, ratio.precise_ones, ratio.values.dtype
    if settings.is_per_row:
        weights = shared_weights(ratio.rows, settings)
        return weights, (1.0 + weights.excess).to(dtype)[:, None] * weighted
    logs, raw = ratio.values, ratio.excess
    if settings.level == "prefix":
        logs = ratio.values.cumsum(dim=-1, dtype=torch.float64)  # thousands of terms: float32 would lose the last ones' digits
        raw = torch.expm1(logs.clamp(-SAFETY_BOUND, SAFETY_BOUND))
    excess = bounded_excess(raw, settings.threshold)
    of_valid = excess * ones
    applied = (1.0 + excess) * weighted if neutral else of_valid + ones
    if settings.level == "prefix":
        logs, raw = logs * ones, raw * ones
    return Weights(logs, raw, of_valid), applied.to(dtype)


def shared_weights(rows: RowSums, settings: WeightSettings) -> Weights:
    """sequence: ``exp(sum_t l_t)``, the unbiased ratio of whole responses; geometric: ``exp(mean_t l_t)``, which does not grow
    with length."""
    logs = rows.log_ratio if settings.level == "sequence" else rows.mean(rows.log_ratio)
    raw = torch.expm1(logs.clamp(-SAFETY_BOUND, SAFETY_BOUND))
    return Weights(logs, raw, bounded_excess(raw, settings.threshold))


def bounded_excess(excess: Tensor, threshold: Threshold) -> Tensor:
    """``w - 1`` after truncation ``min(w, upper)`` (Ionides 2008), or in the band of IcePop (arXiv:2510.18855), from ``w - 1``.

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return excess.clamp_max(threshold.upper - 1.0)
    inside = (excess >= threshold.lower - 1.0) & (excess <= threshold.upper - 1.0)
    return excess.masked_fill(~inside, -1.0)


def weight_totals(
    weights: Weights, rows: RowSums, settings: WeightSettings, ratio: LogRatio | None, *, full: bool
) -> tuple[WeightTotals[Tensor], Means]:
    """What every row adds to the statistics of weights, and to the metrics that are shares.

    ``ratio`` knows which tokens are valid where every token has a weight of its own; None: all tokens of a row share one.
    """
    threshold, tokens, real = settings.threshold, rows.tokens, rows.real
    raw_tokens: WeightSums[Tensor] | None = None
    if ratio is None:
        raw, applied = weights.raw_excess, weights.excess
    else:
        raw, applied = rows.mean(row_sum(weights.raw_excess)), rows.mean(row_sum(weights.excess))
    rows_high, rows_low = real * (raw > threshold.upper - 1.0), real * (raw < threshold.reciprocal_lower - 1.0)
    if ratio is None:
        high, low, count, outside = rows_high, rows_low, real, tokens * (rows_high + rows_low)
        of_tokens, raw_tokens = _sums_of_rows(applied, tokens), _sums_of_rows(raw, tokens)
    else:
        # Logarithms are compared, not weights: they are known beyond the safety bound, too.
        high = ratio.count(torch.gt, weights.logs, math.log(threshold.upper))
        low = ratio.count(torch.lt, weights.logs, math.log(threshold.reciprocal_lower))
        outside, count, of_tokens = high + low, tokens, _sums_of_tokens(ratio, weights.excess)
        raw_tokens = _sums_of_tokens(ratio, weights.raw_excess) if full else None
    means = {
        "rollout_is_ratio_fraction_high": Mean(high, count),
        "rollout_is_ratio_fraction_low": Mean(low, count),
        "rollout_is_seq_fraction_high": Mean(rows_high, real),
        "rollout_is_seq_fraction_low": Mean(rows_low, real),
    }
    if threshold.lower is not None:
        means["rollout_is_oob_ratio"] = Mean(outside, tokens)
    raw_rows = None if raw_tokens is None else _sums_of_rows(raw, real)
    return WeightTotals(of_tokens, _sums_of_rows(applied, real), raw_tokens, raw_rows), means


def _sums_of_tokens(ratio: LogRatio, excess: Tensor) -> WeightSums[Tensor]:
    w = excess + ratio.precise_ones
    return WeightSums(Moments(row_sum(excess), ratio.rows.tokens, vecdot(excess, excess)), vecdot(w, w), ratio.extremes(w))


def _sums_of_rows(excess: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What every row adds whose weight less 1 is ``excess`` ``[B]`` and counts ``count`` ``[B]`` times."""
    w, empty = excess + 1.0, count == 0
    extremes = Extremes(w.masked_fill(empty, -torch.inf), (-w).masked_fill(empty, -torch.inf))
    return WeightSums(Moments(count * excess, count, count * excess.square()), count * w.square(), extremes)


def with_prompts(weights: WeightTotals[Tensor], group_slots: Tensor) -> WeightTotals[Tensor]:
    """And what every prompt adds, ``[B]``: its weight is the mean over those of its rows that have valid tokens."""

    def of_prompts(rows: WeightSums[Tensor]) -> WeightSums[Tensor]:
        count, total = (
            torch.zeros_like(column).index_add_(0, group_slots, column) for column in (rows.excess.count, rows.excess.total)
        )
        return _sums_of_rows(total / count.clamp_min(1.0), count.clamp_max(1.0))

    raw = None if weights.raw_rows is None else of_prompts(weights.raw_rows)
    return replace(weights, prompts=of_prompts(weights.rows), raw_prompts=raw)
