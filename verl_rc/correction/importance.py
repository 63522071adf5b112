"""Importance weights: the ratio pi_train / pi_rollout of a token, a prefix or a sequence, truncated or cut to a band."""

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, as_numbers


def token_weights(ratio: LogRatio, level: str) -> Tensor:
    """Raw weights, float64 ``[B, T]``, of the levels at which every token has its own: ``token`` and ``prefix``.

    token: ``rho_t = exp(l_t)``, which corrects the action but not the states; prefix: ``exp(sum_{s<=t} l_s)``, which
    corrects both (per-decision importance sampling: Precup, Sutton and Singh 2000). Log-weights are bounded by ±20.
    """
    if level == "token":
        return ratio.excess + 1.0
    return ratio.values.cumsum(dim=-1, dtype=torch.float64).clamp_(-SAFETY_BOUND, SAFETY_BOUND).exp_()


def row_weights(row_sums: Tensor, tokens: Tensor, level: str) -> Tensor:
    """Raw weights ``[B]`` of the levels at which a row has one: ``sequence`` and ``geometric``.

    ``row_sums`` holds each row's sum of token log-ratios, ``tokens`` how many they are. sequence: ``exp(sum_t l_t)``, the
    unbiased ratio of whole responses; geometric: ``exp(mean_t l_t)``, which does not grow with length. Log-weights are
    bounded by ±20.
    """
    logs = row_sums if level == "sequence" else row_sums / tokens.clamp_min(1.0)
    return logs.clamp(-SAFETY_BOUND, SAFETY_BOUND).exp_()


def bounded_weights(weights: Tensor, threshold: Threshold) -> Tensor:
    """Truncation ``min(w, upper)`` (Ionides 2008), or with a lower bound the band of IcePop (arXiv:2510.18855).

    Any shape. IcePop keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return weights.clamp_max(threshold.upper)
    inside = (weights >= threshold.lower) & (weights <= threshold.upper)
    return torch.where(inside, weights, 0.0)


def weighted_tokens(ratio: LogRatio, config: RolloutCorrectionConfig) -> Tensor:
    """1 for tokens with a weight, else 0, ``[B, T]``: the valid ones, or all of the response if ``nonfinite_logprob=neutral``."""
    return as_numbers(ratio.response_mask, ratio.values.dtype) if config.nonfinite_logprob == "neutral" else ratio.ones
