"""Rejection: which tokens and sequences the divergence between train and rollout policy excludes from the
loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule, RejectionRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum


@dataclass(frozen=True)
class Judged:
    """The statistic of a rule for tokens ``[b, t]`` or sequences ``[b]``; 1 where it is outside the rule's
    bounds, else 0."""

    statistic: Tensor
    above: Tensor
    below: Tensor


@dataclass(frozen=True)
class Rejection:
    """Tokens ``[b, t]`` that are rejected by themselves, or sequences ``[b]`` that are rejected as a
    whole."""

    causes: dict[str, Tensor]
    """1 for those that a cause rejects, and 0 elsewhere. A cause is the name of a rule, ``veto``, ``opsm`` or
    ``nonfinite``."""
    kept: Tensor
    """1 for response tokens, or sequences, that no cause rejects, and 0 elsewhere."""
    judged: dict[str, Judged]
    """By name of a rule."""
    below_veto: Tensor | None = None
    """Tokens of each sequence whose ratio is below the veto, ``[b]``."""

    @property
    def alone(self) -> dict[str, Tensor]:
        """1 for those that a cause alone rejects, by cause."""
        once = indicator(torch.eq, sum(self.causes.values(), torch.zeros_like(self.kept)), 1.0)
        return {name: rejected * once for name, rejected in self.causes.items()}


def reject_tokens(ratio: LogRatio, settings: CorrectionSettings, advantages: Tensor | None) -> Rejection:
    """Apply all rules that look at single tokens.

    ``advantages`` ``[b, t]`` are for the rule that depends on their sign; ``ValueError`` when they are
    missing. For tokens with non-finite log-probs rules see a ratio of 1 under ``nonfinite_logprob=neutral``,
    and no rule applies otherwise.
    """
    judged = {
        rule.name: judge(rule, rule_statistic(rule.rule, ratio))
        for rule in settings.rules
        if rule.rule.is_per_token
    }
    candidates = ratio.response if settings.nonfinite == "neutral" else ratio.ones
    causes = {name: (one.above + one.below).mul_(candidates) for name, one in judged.items()}
    if settings.opsm_threshold is not None:
        if advantages is None:
            threshold = f"rollout_opsm_threshold={settings.opsm_threshold}"
            raise ValueError(f"{threshold} looks at the sign of the advantages: pass advantages [B, T]")
        # Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9) drops negative samples
        # that the trained policy no longer produces: A_t < 0 where mean_t log(pi_rollout / pi_train) is above
        # the threshold.
        drifted = -ratio.sums.mean(ratio.sums.log_ratio) > settings.opsm_threshold
        causes["opsm"] = ratio.response * ((advantages < 0) & drifted[:, None])
    if settings.nonfinite == "reject_token":
        causes["nonfinite"] = ratio.response - ratio.ones
    return Rejection(causes, _kept(causes, ratio.response), judged)


def reject_sequences(ratio: LogRatio, settings: CorrectionSettings) -> Rejection:
    """Apply all rules that look at whole sequences. Without valid tokens one is rejected only for non-finite
    log-probs."""
    sums, below_veto = ratio.sums, None
    judged = {
        rule.name: judge(rule, rule_statistic(rule.rule, ratio))
        for rule in settings.rules
        if not rule.rule.is_per_token
    }
    causes = {name: (one.above + one.below).mul_(sums.real) for name, one in judged.items()}
    if settings.log_veto is not None:
        # Unbounded log-ratios are compared: a veto may lie beyond the safety bound.
        below_veto = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto))
        causes["veto"] = below_veto.clamp_max(1.0)
    if settings.nonfinite == "reject_sequence":
        causes["nonfinite"] = indicator(torch.lt, sums.tokens, sums.response_tokens)
    return Rejection(causes, _kept(causes, torch.ones_like(sums.tokens)), judged, below_veto)


def rule_statistic(rule: RejectionRule, ratio: LogRatio) -> Tensor:
    """The statistic of a rule: per token ``[b, t]``, or its sum, mean or maximum in each sequence ``[b]``, 0
    for an empty one."""
    of_tokens = ratio.divergence(rule.divergence)
    if rule.scope == "token":
        return of_tokens
    if rule.scope == "seq_max":
        return extremes(of_tokens, ratio.ones).largest.clamp_min(0.0)  # all of them are >= 0
    total = sequence_sum(of_tokens)
    return total if rule.scope == "seq_sum" else ratio.sums.mean(total)


def judge(rule: BoundedRule, statistic: Tensor) -> Judged:
    """Compare a statistic with the rule's bounds."""
    above, below = indicator(torch.gt, statistic, rule.upper), indicator(torch.lt, statistic, rule.lower)
    return Judged(statistic, above, below)


def _kept(causes: dict[str, Tensor], candidates: Tensor) -> Tensor:
    """1 for ``candidates`` that no cause rejects. Every cause applies to all of them, not to what another one
    has left."""
    if not causes:
        return candidates
    return indicator(torch.eq, sum(causes.values(), torch.zeros_like(candidates)), 0.0).mul_(candidates)
