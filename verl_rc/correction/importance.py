"""Importance weights: the ratio pi_train / pi_rollout per token or per sequence, truncated or cut to a band."""

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio


def raw_weights(ratio: LogRatio, level: str) -> Tensor:
    """Unbounded-by-threshold weights ``[B, T]``, 0 outside ``ratio.valid``.

    token: ``rho_t = exp(clip(l_t, ±20))``; sequence: ``exp(clip(sum_t l_t, ±20))`` on every token of the row.
    """
    if level == "token":
        log_weights = ratio.bounded
    else:
        log_weights = ratio.row_sums.clamp(-SAFETY_BOUND, SAFETY_BOUND)[:, None].expand_as(ratio.values)
    return torch.where(ratio.valid, log_weights.exp(), 0.0)


def bounded_weights(weights: Tensor, threshold: Threshold) -> Tensor:
    """Truncation ``min(w, upper)`` (truncated importance sampling, Ionides 2008), or with a lower bound the band of
    IcePop.

    IcePop (arXiv:2510.18855) keeps ``w`` where ``lower <= w <= upper`` and puts 0 elsewhere.
    """
    if threshold.lower is None:
        return weights.clamp_max(threshold.upper)
    inside = (weights >= threshold.lower) & (weights <= threshold.upper)
    return torch.where(inside, weights, 0.0)


def applied_weights(ratio: LogRatio, config: RolloutCorrectionConfig) -> Tensor:
    """The weights after truncation or band, before batch normalisation, ``[B, T]``."""
    assert config.rollout_is is not None
    return bounded_weights(raw_weights(ratio, config.rollout_is), config.weight_threshold())
