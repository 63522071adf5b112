"""Rejection rules: statistics of the divergence between train and rollout policy, and the tokens or rows they keep."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import RejectionRule
from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.log_ratio import LogRatio, as_numbers, holds, row_sum


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

    def rejects(self, statistic: Tensor) -> Tensor:
        """The same the other way round as numbers of the statistic's type: 1 outside the bounds, 0 within."""
        outside = holds(torch.gt, statistic, self.upper)
        return outside if self.lower is None else outside.add_(holds(torch.lt, statistic, self.lower))

    def clamp(self, statistic: Tensor) -> Tensor:
        """The statistic, moved to the nearest bound where it lies outside."""
        return statistic.clamp(min=self.lower, max=self.upper)

    @property
    def clamped_zero(self) -> float:
        """``clamp(0)``: what the statistic of two policies that agree becomes."""
        return min(max(0.0, -math.inf if self.lower is None else self.lower), self.upper)

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


@dataclass(frozen=True)
class TokenDecision:
    """What the rules for tokens say about some rows."""

    keep: Tensor | None
    """bool ``[B, T]``; True outside the response mask, where there is nothing to judge. None: nothing is rejected."""
    rejected: dict[str, Tensor]
    """By name of the rule, ``[B, T]``: 1 for tokens that it rejects, 0 elsewhere."""


def decide_tokens(
    ratio: LogRatio, rules: list[BoundedRule], config: RolloutCorrectionConfig, advantages: Tensor | None
) -> TokenDecision:
    """Judge every token. ``advantages`` ``[B, T]`` are for rules that look at their sign; ``ValueError`` when one misses them.

    Tokens without finite log-probs are judged like a ratio of 1 under ``nonfinite_logprob=neutral``, and else by no rule.
    """
    neutral = config.nonfinite_logprob == "neutral"
    judged = ratio.response if neutral else ratio.ones
    rejected = {
        bounded.name: bounded.rejects(ratio.divergence(bounded.rule.divergence)).to(judged.dtype).mul_(judged)
        for bounded in rules
        if bounded.rule.is_per_token
    }
    if config.rollout_opsm_threshold is not None:
        rejected["opsm"] = as_numbers(_masked_by_sign(ratio, config.rollout_opsm_threshold, advantages), judged.dtype)
    causes = list(rejected.values())
    if config.nonfinite_logprob == "reject_token":
        causes.append(ratio.response - ratio.ones)
    if not causes:
        return TokenDecision(None, rejected)
    times = causes[0] if len(causes) == 1 else torch.stack(causes).sum(dim=0)
    return TokenDecision(holds(torch.eq, times, 0.0).bool(), rejected)


def _masked_by_sign(ratio: LogRatio, threshold: float, advantages: Tensor | None) -> Tensor:
    """bool ``[B, T]``: what off-policy sequence masking rejects (DeepSeek-V3.2, arXiv:2512.02556, equation 9).

    ``A_t < 0`` and ``mean_t log(pi_rollout / pi_train) > threshold`` (nats) over the row's valid tokens: negative samples that
    the trained policy no longer produces.
    """
    if advantages is None:
        raise ValueError(f"rollout_opsm_threshold={threshold} looks at the sign of the advantages: pass advantages [B, T]")
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
