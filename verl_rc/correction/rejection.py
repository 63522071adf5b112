"""Rejection rules: statistics of the divergence between train and rollout policy, and the tokens or rows they keep."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import RejectionRule
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.log_ratio import LogRatio, row_sum


@dataclass(frozen=True)
class Limit:
    """What lies beyond one side of a rule's bounds."""

    compare: Callable[..., Tensor]
    """``torch.gt`` or ``torch.lt``: ``compare(statistic, bound)`` is True beyond."""
    bound: float
    """Infinite where there is none."""


@dataclass(frozen=True)
class BoundedRule:
    """A rejection rule with the bounds of its statistic, both inclusive."""

    rule: RejectionRule
    """What it looks at."""
    upper: float
    """Largest accepted value of the statistic."""
    lower: float | None = None
    """Smallest accepted value; None: no bound. k1 = -log ratio, so a ratio in [L, U] is a statistic in [-ln U, -ln L]."""

    @property
    def name(self) -> str:
        """The rule's name."""
        return self.rule.name

    def accepts(self, statistic: Tensor) -> Tensor:
        """bool, same shape: within the bounds."""
        kept = statistic <= self.upper
        return kept if self.lower is None else kept & (statistic >= self.lower)

    def clamp(self, statistic: Tensor) -> Tensor:
        """The statistic, moved to the nearest bound where it lies outside."""
        return statistic.clamp(min=self.lower, max=self.upper)

    @property
    def limits(self) -> tuple[Limit, Limit]:
        """Beyond the user's upper bound, and beyond the lower one. Those of k1 bound the ratio ``exp(-statistic)``."""
        above = Limit(torch.gt, self.upper)
        if self.lower is None:
            return above, Limit(torch.lt, -math.inf)
        return Limit(torch.lt, self.lower), above

    def beyond(self, statistic: Tensor) -> tuple[Tensor, Tensor]:
        """bool twice, same shape: beyond either limit."""
        high, low = self.limits
        return high.compare(statistic, high.bound), low.compare(statistic, low.bound)


def bounded_rules(config: RolloutCorrectionConfig) -> list[BoundedRule]:
    """The rules of ``config`` in the order given. k1 thresholds bound the *ratio*: ``lower <= pi_train/pi_rollout <= upper``."""
    bounds = config.rejection_bounds()
    rules = []
    for rule in config.rejection_rules():
        threshold = bounds[rule.name]
        if rule.bounds_ratio:
            upper, lower = -math.log(threshold.reciprocal_lower), -math.log(threshold.upper)
            rules.append(BoundedRule(rule, upper, lower))
        else:
            rules.append(BoundedRule(rule, threshold.upper))
    return rules


def row_aggregates(ratio: LogRatio, rules: list[BoundedRule]) -> dict[str, Tensor]:
    """Columns ``[B]`` the ``seq_*`` rules are computed from: ``k2.sum``, ``k2.max``, … over each row's valid tokens."""
    columns: dict[str, Tensor] = {}
    for bounded in rules:
        rule = bounded.rule
        if rule.scope in ("seq_sum", "seq_mean"):
            columns[f"{rule.divergence}.sum"] = row_sum(ratio.divergence(rule.divergence))
        elif rule.scope == "seq_max":  # all of them are >= 0
            columns[f"{rule.divergence}.max"] = ratio.row_max(ratio.divergence(rule.divergence)).clamp_min(0.0)
    return columns


def row_statistic(rule: RejectionRule, columns: Mapping[str, Tensor]) -> Tensor:
    """The statistic ``[B]`` of a ``seq_*`` rule: sum, mean or maximum over the row's tokens; 0 for a row without any."""
    if rule.scope == "seq_max":
        return columns[f"{rule.divergence}.max"]
    total = columns[f"{rule.divergence}.sum"]
    return total if rule.scope == "seq_sum" else total / columns["tokens"].clamp_min(1.0)


def token_keep(ratio: LogRatio, rules: list[BoundedRule], config: RolloutCorrectionConfig) -> Tensor:
    """bool ``[B, T]``: kept by every token rule; True outside the response mask, where there is nothing to judge."""
    judged = ratio.response_mask if config.nonfinite_logprob == "neutral" else ratio.valid
    keep = torch.ones_like(ratio.valid)
    for bounded in rules:
        if bounded.rule.is_per_token:
            keep &= bounded.accepts(ratio.divergence(bounded.rule.divergence))
    keep |= ~judged
    if config.nonfinite_logprob == "reject_token":
        keep &= ratio.valid | ~ratio.response_mask
    return keep


def masked_by_sign(ratio: LogRatio, threshold: float, advantages: Tensor) -> Tensor:
    """bool ``[B, T]``: what off-policy sequence masking rejects (DeepSeek-V3.2, arXiv:2512.02556, equation 9).

    ``A_t < 0`` and ``mean_t log(pi_rollout / pi_train) > threshold`` (nats) over the row's valid tokens: negative samples that
    the trained policy no longer produces.
    """
    drift = -row_sum(ratio.values) / ratio.tokens.clamp_min(1.0)
    return ratio.response_mask & (drift > threshold)[:, None] & (advantages < 0)


def row_keep(columns: Mapping[str, Tensor], rules: list[BoundedRule], config: RolloutCorrectionConfig) -> Tensor:
    """bool ``[B]``: rows kept by every ``seq_*`` rule, the veto and the policy for non-finite log-probs.

    The veto rejects a row when a single valid token has ``l < ln(veto)``, l being the unbounded log-ratio. Rows without
    valid tokens pass.
    """
    keep = torch.ones_like(columns["tokens"], dtype=torch.bool)
    for bounded in rules:
        if not bounded.rule.is_per_token:
            keep &= bounded.accepts(row_statistic(bounded.rule, columns))
    if config.rollout_token_veto_threshold is not None:
        keep &= ~vetoed_rows(columns, config.rollout_token_veto_threshold)
    keep |= columns["tokens"] == 0
    if config.nonfinite_logprob in ("reject_sequence", "raise"):
        keep &= columns["tokens"] == columns["response_tokens"]
    return keep


def vetoed_rows(columns: Mapping[str, Tensor], veto: float) -> Tensor:
    """bool ``[B]``: rows with a token whose ratio is below ``veto``."""
    return -columns["negated_log_ratio.max"] < math.log(veto)
