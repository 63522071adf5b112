"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix or a sequence, truncated or cut to a band."""

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, holds


def token_log_weights(ratio: LogRatio, config: RolloutCorrectionConfig) -> Tensor:
    """Logarithms of raw weights, unbounded, ``[B, T]``, of the levels at which every token has its own: ``token``, ``prefix``.

    token: ``l_t``, which corrects the action but not the states; prefix: ``sum_{s<=t} l_s`` in float64, which corrects both
    (per-decision importance sampling: Precup, Sutton and Singh 2000). A token that is not valid counts like a ratio of 1.
    """
    return ratio.values if config.rollout_is == "token" else ratio.values.cumsum(dim=-1, dtype=torch.float64)


def row_weights(row_sums: Tensor, tokens: Tensor, level: str) -> Tensor:
    """Raw weights ``[B]`` of the levels at which a row has one: ``sequence`` and ``geometric``.

    ``row_sums`` holds each row's sum of token log-ratios, ``tokens`` how many they are. sequence: ``exp(sum_t l_t)``, the
    unbiased ratio of whole responses; geometric: ``exp(mean_t l_t)``, which does not grow with length. Log-weights are
    bounded by ±20.
    """
    return bounded_exp(row_sums if level == "sequence" else row_sums / tokens.clamp_min(1.0))


def bounded_exp(logs: Tensor) -> Tensor:
    """Weights from their logarithms, which are bounded by ±20; any shape."""
    return logs.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()


def bounded_weights(weights: Tensor, threshold: Threshold) -> Tensor:
    """Truncation ``min(w, upper)`` (Ionides 2008), or with a lower bound the band of IcePop (arXiv:2510.18855).

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return weights.clamp_max(threshold.upper)
    return _within(weights, threshold.lower, threshold.upper).mul_(weights)


def bounded_excess(excess: Tensor, threshold: Threshold) -> Tensor:
    """``bounded_weights(w) - 1`` from ``w - 1``, exact near 0."""
    if threshold.lower is None:
        return excess.clamp_max(threshold.upper - 1.0)
    inside = _within(excess, threshold.lower - 1.0, threshold.upper - 1.0)
    return torch.addcmul(inside - 1.0, inside, excess)


def _within(values: Tensor, lower: float, upper: float) -> Tensor:
    """1 where ``lower <= values <= upper``, else 0."""
    return holds(torch.ge, values, lower).mul_(holds(torch.le, values, upper))


def weighted_tokens(ratio: LogRatio, config: RolloutCorrectionConfig) -> Tensor:
    """1 for tokens with a weight, else 0, ``[B, T]``: the valid ones, or all of the response if ``nonfinite_logprob=neutral``."""
    return ratio.response if config.nonfinite_logprob == "neutral" else ratio.ones
