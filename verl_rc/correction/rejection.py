"""Rejection rules: statistics of the divergence between train and rollout policy, and the tokens or rows they keep."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import LogRatio


@dataclass(frozen=True)
class RuleStatistic:
    """What one rule looks at, and the bounds it must lie in."""

    name: str
    values: Tensor
    """``[B, T]`` for token rules; ``[B, 1]`` for seq rules (one number per row)."""
    lower: float | None
    upper: float
    log_upper: float
    """Bounds as the statistic is reported: k1 is ``-log ratio``, so its range is ``[-ln upper, -ln lower]``."""
    log_lower: float | None

    @property
    def is_token_rule(self) -> bool:
        """Whether single tokens are rejected."""
        return self.name.startswith("token_")

    @property
    def keep(self) -> Tensor:
        """bool, shape of ``values``: within the bounds, both inclusive."""
        kept = self.values <= self.log_upper
        return kept if self.log_lower is None else kept & (self.values >= self.log_lower)


def rule_statistics(ratio: LogRatio, config: RolloutCorrectionConfig) -> list[RuleStatistic]:
    """The statistic of every rule of ``config``, each on the original tokens, in the order given.

    On bounded token log-ratios ``l``: k1 = -l, k2 = l^2 / 2, k3 = e^l - 1 - l; seq rules take their sum, mean or
    maximum over the
    row's tokens (0 for a row without any). k1 bounds are bounds on the *ratio*: ``lower <= pi_train/pi_rollout <=
    upper``. """
    divergences: dict[str, Tensor] = {}
    statistics = []
    for rule, threshold in config.rejection_bounds().items():
        *scope, kind = rule.split("_")
        if kind not in divergences:
            divergences[kind] = _divergence(ratio.bounded, kind)
        values = _aggregate(divergences[kind], ratio, scope)
        statistics.append(_with_bounds(rule, values, threshold, is_ratio=kind == "k1"))
    return statistics


def _divergence(log_ratios: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return -log_ratios
    if kind == "k2":
        return log_ratios.square() / 2
    return torch.expm1(log_ratios) - log_ratios


def _aggregate(tokens: Tensor, ratio: LogRatio, scope: list[str]) -> Tensor:
    if scope == ["token"]:
        return tokens
    masked = torch.where(ratio.valid, tokens, 0.0)
    if scope == ["seq", "max"]:
        return masked.amax(dim=-1, keepdim=True)  # k2 and k3 are >= 0, so masked tokens never win
    total = masked.sum(dim=-1, keepdim=True)
    return total if scope == ["seq", "sum"] else total / ratio.row_counts.clamp_min(1)[:, None]


def _with_bounds(rule: str, values: Tensor, threshold: Threshold, is_ratio: bool) -> RuleStatistic:
    if not is_ratio:
        return RuleStatistic(rule, values, None, threshold.upper, threshold.upper, None)
    lower, upper = threshold.reciprocal_lower, threshold.upper
    return RuleStatistic(rule, values, lower, upper, log_upper=-math.log(lower), log_lower=-math.log(upper))


def keep_mask(ratio: LogRatio, statistics: list[RuleStatistic]) -> Tensor:
    """bool ``[B, T]``: kept by every rule and by the policy for non-finite log-probs. Positions outside the mask are
    True."""
    keep = ~ratio.rejected
    for statistic in statistics:
        keep = keep & kept_by(statistic, ratio)
    return keep


def kept_by(statistic: RuleStatistic, ratio: LogRatio) -> Tensor:
    """bool ``[B, T]`` or ``[B, 1]``: what one rule keeps; it has no say where there is nothing to look at."""
    unseen = ~ratio.valid if statistic.is_token_rule else (ratio.row_counts == 0)[:, None]
    return statistic.keep | unseen
