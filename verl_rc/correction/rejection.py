"""Rejection: which tokens and sequences the divergence between train and rollout policy excludes from the
loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule, RejectionRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.totals import RuleSums, SequenceSums
from verl_rc.metrics.mergeable import Moments


@dataclass(frozen=True)
class Rejection:
    """Tokens ``[b, t]`` that are rejected by themselves, or sequences ``[B]`` that are rejected as a
    whole."""

    causes: dict[str, Tensor]
    """1 for those that a cause rejects, and 0 elsewhere. A cause is the name of a rule, ``veto``, ``opsm`` or
    ``nonfinite``."""
    kept: Tensor
    """1 for response tokens, or sequences, that no cause rejects, and 0 elsewhere."""
    rules: dict[str, RuleSums]
    """What the rules measure, by name."""

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
    candidates = ratio.response if settings.nonfinite == "neutral" else ratio.valid
    causes, rules = dict[str, Tensor](), dict[str, RuleSums]()
    for rule in settings.rules:
        if not rule.rule.rejects_rows:
            statistic = rule_statistic(rule.rule, ratio)
            above, below = outside(rule, statistic)
            # Measured here: the comparisons of one rule are freed before those of the next.
            counted = statistic if rule.rule.scope == "token" else statistic * ratio.valid
            rules[rule.name] = _token_rule_sums(rule, ratio, counted, above, below)
            causes[rule.name] = above.add_(below).mul_(candidates)
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
        causes["nonfinite"] = ratio.response - ratio.valid
    return Rejection(causes, _kept(causes, ratio.response), rules)


@dataclass(frozen=True)
class SequenceEvidence:
    """What decides whether sequences are rejected as a whole, float64 ``[b]``."""

    sums: SequenceSums
    kept_tokens: Tensor
    """Response tokens that are not rejected by themselves."""
    statistics: dict[str, Tensor]
    """By name of a rule on sequences."""
    tokens_below_veto: Tensor | None
    """None without a veto."""

    @classmethod
    def from_tokens(
        cls, ratio: LogRatio, tokens: Rejection, settings: CorrectionSettings
    ) -> "SequenceEvidence":
        """Add up the tokens of each sequence."""
        rules = [rule for rule in settings.rules if rule.rule.rejects_rows]
        below_veto = None
        if settings.log_veto is not None:
            # Unbounded log-ratios are compared: a veto may lie beyond the safety bound.
            below_veto = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto))
        return cls(
            sums=ratio.sums,
            kept_tokens=tokens.kept.sum(dim=-1).double() if tokens.causes else ratio.sums.response_tokens,
            statistics={rule.name: rule_statistic(rule.rule, ratio) for rule in rules},
            tokens_below_veto=below_veto,
        )


def reject_sequences(evidence: SequenceEvidence, settings: CorrectionSettings) -> Rejection:
    """Apply all rules that look at whole sequences. Without valid tokens one is rejected only for non-finite
    log-probs."""
    sums, causes, rules = evidence.sums, dict[str, Tensor](), dict[str, RuleSums]()
    for rule in settings.rules:
        if rule.rule.rejects_rows:
            statistic = evidence.statistics[rule.name]
            above, below = (sums.real * side for side in outside(rule, statistic))
            rules[rule.name] = _sequence_rule_sums(rule, sums, statistic, above, below)
            causes[rule.name] = above + below
    if evidence.tokens_below_veto is not None:
        causes["veto"] = evidence.tokens_below_veto.clamp_max(1.0)
    if settings.nonfinite == "reject_sequence":
        causes["nonfinite"] = indicator(torch.lt, sums.tokens, sums.response_tokens)
    return Rejection(causes, _kept(causes, torch.ones_like(sums.tokens)), rules)


def rule_statistic(rule: RejectionRule, ratio: LogRatio) -> Tensor:
    """The statistic of a rule: per token ``[b, t]``, of a turn at each of its response tokens ``[b, t]``, or
    its sum, mean or maximum in each sequence ``[b]``, 0 for an empty one."""
    divergences = ratio.divergence(rule.divergence)
    if rule.scope == "token":
        return divergences
    if not rule.rejects_rows:
        total = ratio.turn_sums(divergences)
        return total if rule.scope == "turn_sum" else total / ratio.turn_sums(ratio.valid).clamp_min_(1.0)
    if rule.scope == "seq_max":
        return extremes(divergences, ratio.valid).largest.clamp_min(0.0)  # all of them are >= 0
    total = sequence_sum(divergences)
    return total if rule.scope == "seq_sum" else ratio.sums.mean(total)


def outside(rule: BoundedRule, statistic: Tensor) -> tuple[Tensor, Tensor]:
    """1 where a statistic is above the rule's bounds, and 1 where it is below; 0 elsewhere."""
    return indicator(torch.gt, statistic, rule.upper), indicator(torch.lt, statistic, rule.lower)


def _token_rule_sums(
    rule: BoundedRule, ratio: LogRatio, statistic: Tensor, above: Tensor, below: Tensor
) -> RuleSums:
    total, clamped = sequence_sum(statistic), _clamped(rule, statistic)
    return RuleSums(
        mean=ratio.sums.mean(total),
        total=total,
        clamped=Moments(sequence_sum(clamped), ratio.sums.tokens, sequence_sum(clamped.square())),
        extremes=extremes(statistic, ratio.valid),
        above=ratio.count(above),
        below=ratio.count(below),
    )


def _sequence_rule_sums(
    rule: BoundedRule, sums: SequenceSums, statistic: Tensor, above: Tensor, below: Tensor
) -> RuleSums:
    # Every token counts with the statistic of its sequence.
    tokens, clamped = sums.tokens, _clamped(rule, statistic)
    moments = Moments(tokens * clamped, tokens, tokens * clamped.square())
    return RuleSums(statistic, tokens * statistic, moments, extremes(statistic, tokens), above, below)


def _clamped(rule: BoundedRule, statistic: Tensor) -> Tensor:
    # Counted from the bound nearest to 0: values of two policies that agree add nothing, not even rounding.
    return statistic.clamp(rule.lower, rule.upper) - min(max(0.0, rule.lower), rule.upper)


def _kept(causes: dict[str, Tensor], candidates: Tensor) -> Tensor:
    """1 for ``candidates`` that no cause rejects. Every cause applies to all of them, not to what another one
    has left."""
    if not causes:
        return candidates
    return indicator(torch.eq, sum(causes.values(), torch.zeros_like(candidates)), 0.0).mul_(candidates)
