"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix or a sequence, truncated or cut to
a band."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rejection_rules import Threshold
from verl_rc.config.rollout_correction import WeightSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.totals import Means, SequenceSums, TokenSums, WeightLevels, WeightSums, WeightTotals
from verl_rc.metrics.mean import Mean, Moments
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


def importance_weights(ratio: LogRatio, settings: WeightSettings, weighted: Tensor) -> Weights:
    """``exp`` of a log-weight within ±``LOG_RATIO_BOUND``, then the threshold, for the tokens where
    ``weighted`` is 1.

    Log-weights by level. token: ``l_t``, which corrects the action but not the states. prefix: ``sum_{s<=t}
    l_s``, which corrects both (per-decision importance sampling: Precup, Sutton and Singh 2000). Others: see
    ``sequence_weights``.
    """
    bounds, dtype = settings.threshold, weighted.dtype
    if settings.is_per_row:
        logs, raw, excess = sequence_weights(ratio.sums, settings)
        return Weights(logs, raw, excess, (1.0 + excess).to(dtype)[:, None] * weighted)
    logs, raw = ratio.values, ratio.excess
    if settings.level == "prefix":
        # Sums of thousands of terms: float32 would lose the digits of the last ones.
        logs = ratio.values.cumsum(dim=-1, dtype=torch.float64)
        raw = torch.expm1(bound_log_ratio(logs))
    excess = bounded_excess(raw, bounds)
    applied = (1.0 + excess).to(dtype).mul_(weighted)
    # Where no token is valid, prefixes run on, and bounds without 1 in them leave another weight.
    if settings.level == "prefix":
        logs, raw = logs * ratio.ones, raw * ratio.ones
    if settings.level == "prefix" or not bounds.keeps_one:
        excess = excess * ratio.ones
    return Weights(logs, raw, excess, applied)


def sequence_weights(sums: SequenceSums, settings: WeightSettings) -> tuple[Tensor, Tensor, Tensor]:
    """One weight for all tokens of a sequence, ``[B]``: its logarithm, and ``w - 1`` before and after the
    threshold.

    sequence: ``exp(sum_t l_t)``, the unbiased ratio of whole responses. geometric: ``exp(mean_t l_t)``, which
    does not grow with length.
    """
    logs = sums.log_ratio if settings.level == "sequence" else sums.mean(sums.log_ratio)
    # The sum is bounded, not its terms: single tokens beyond the bound may well make up for each other.
    raw = torch.expm1(bound_log_ratio(logs))
    return logs, raw, bounded_excess(raw, settings.threshold)


def bounded_excess(excess: Tensor, threshold: Threshold) -> Tensor:
    """``w - 1`` after truncation ``min(w, upper)`` (Ionides 2008), or in the band of IcePop
    (arXiv:2510.18855), from ``w - 1``.

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return excess.clamp_max(threshold.upper - 1.0)
    inside = (excess >= threshold.lower - 1.0) & (excess <= threshold.upper - 1.0)
    return excess.masked_fill(~inside, -1.0)


def token_weight_means(weights: Weights, threshold: Threshold, ratio: LogRatio) -> Means[Tensor]:
    """Shares of tokens with a weight above and below the threshold, where every token has its own."""
    # Logarithms are compared, not weights: they are known beyond the safety bound, too.
    high = ratio.count(indicator(torch.gt, weights.logs, math.log(threshold.upper)))
    low, tokens = (
        ratio.count(indicator(torch.lt, weights.logs, math.log(threshold.reciprocal_lower))),
        ratio.sums.tokens,
    )
    means = {
        "rollout_is_ratio_fraction_high": Mean(high, tokens),
        "rollout_is_ratio_fraction_low": Mean(low, tokens),
    }
    return means if threshold.lower is None else {**means, "rollout_is_oob_ratio": Mean(high + low, tokens)}


def weight_totals(found: TokenSums, settings: WeightSettings) -> tuple[WeightTotals[Tensor], Means[Tensor]]:
    """What every sequence adds to the weights' statistics, and to the metrics that are shares."""
    sums, bounds, raw_mean = found.sums, settings.threshold, found.raw_weight
    if raw_mean is None:  # all tokens of a sequence share one weight
        _, raw_mean, excess = sequence_weights(sums, settings)
        levels = [
            WeightLevels(weighted_sums(e, sums.tokens), weighted_sums(e, sums.real))
            for e in (excess, raw_mean)
        ]
    else:
        levels = [WeightLevels(w, weighted_sums(sums.mean(w.excess.total), sums.real)) for w in found.weights]
    high, low = (
        sums.real * (raw_mean > bounds.upper - 1.0),
        sums.real * (raw_mean < bounds.reciprocal_lower - 1.0),
    )
    means = {
        "rollout_is_seq_fraction_high": Mean(high, sums.real),
        "rollout_is_seq_fraction_low": Mean(low, sums.real),
    }
    if settings.is_per_row:
        means |= {
            "rollout_is_ratio_fraction_high": Mean(high, sums.real),
            "rollout_is_ratio_fraction_low": Mean(low, sums.real),
        }
        means |= (
            {"rollout_is_oob_ratio": Mean(sums.tokens * (high + low), sums.tokens)}
            if bounds.lower is not None
            else {}
        )
    return WeightTotals(levels[0], levels[1] if len(levels) > 1 else None), means


def sums_of_tokens(excess: Tensor, ones: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds. ``excess`` is ``w - 1`` of the ``count`` tokens where ``ones`` is 1, and 0
    where it is 0."""
    w = excess + ones
    moments = Moments(sequence_sum(excess), count, vecdot(excess, excess))
    # The extremes are those of weights as they are applied: in float32 where log-probs are, at half the cost.
    return WeightSums(moments, vecdot(w, w), extremes(w.to(ones.dtype), ones))


def weighted_sums(excess: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds, with ``w - 1 = excess`` ``[B]`` counted ``count`` ``[B]`` times."""
    w = excess + 1.0
    moments = Moments(count * excess, count, count * excess.square())
    return WeightSums(moments, count * w.square(), extremes(w, count))


def with_prompts(weights: WeightTotals[Tensor], group_slots: Tensor) -> WeightTotals[Tensor]:
    """Add the level of prompts, ``[B]``: a prompt's weight is the mean over its sequences with valid
    tokens."""

    def of_prompts(levels: WeightLevels[Tensor]) -> WeightLevels[Tensor]:
        of = levels.sequences.excess
        count, total = (
            torch.zeros_like(column).index_add_(0, group_slots, column) for column in (of.count, of.total)
        )
        return replace(levels, prompts=weighted_sums(total / count.clamp_min(1.0), count.clamp_max(1.0)))

    return WeightTotals(of_prompts(weights.applied), None if weights.raw is None else of_prompts(weights.raw))
