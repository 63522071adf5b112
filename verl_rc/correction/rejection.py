"""Rejection: which tokens and sequences the divergence between train and rollout policy excludes from the
loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule, RejectionRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, moments, sequence_sum
from verl_rc.correction.totals import RuleSums, SequenceSums, TokenSums


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
            sides = ratio.count(above), ratio.count(below)
            rules[rule.name] = _rule_sums(rule, ratio.sums, counted, ratio.valid, sides)
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


def reject_sequences(tokens: TokenSums, settings: CorrectionSettings) -> Rejection:
    """Apply all rules that look at whole sequences ``[B]``. Without valid tokens one is rejected only for
    non-finite log-probs."""
    sums, causes, rules = tokens.sequences, dict[str, Tensor](), dict[str, RuleSums]()
    for rule in settings.rules:
        if rule.rule.rejects_rows:
            statistic = tokens.row_statistics[rule.name]
            above, below = (sums.valid_rows * side for side in outside(rule, statistic))
            rules[rule.name] = _rule_sums(rule, sums, statistic, sums.tokens, (above, below))
            causes[rule.name] = above + below
    if settings.log_veto is not None:
        causes["veto"] = tokens.row_statistics["veto"].clamp_max(1.0)
    if settings.nonfinite == "reject_sequence":
        causes["nonfinite"] = indicator(torch.lt, sums.tokens, sums.response_tokens)
    return Rejection(causes, _kept(causes, torch.ones_like(sums.tokens)), rules)


def row_statistics(ratio: LogRatio, settings: CorrectionSettings) -> dict[str, Tensor]:
    """``TokenSums.row_statistics`` of the sequences of a chunk, float64 ``[b]``."""
    rules = [rule for rule in settings.rules if rule.rule.rejects_rows]
    statistics = {rule.name: rule_statistic(rule.rule, ratio) for rule in rules}
    if settings.log_veto is not None:
        # Unbounded log-ratios are compared: a veto may lie beyond the safety bound.
        statistics["veto"] = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto))
    return statistics


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


def _rule_sums(
    rule: BoundedRule, sums: SequenceSums, statistic: Tensor, count: Tensor, sides: tuple[Tensor, Tensor]
) -> RuleSums:
    """What a rule measures in each sequence, from its ``statistic``: of tokens ``[b, t]``, 0 where none is
    valid, or of sequences ``[B]``, with which each of their tokens counts; ``sides`` ``[b]`` are above and
    below the bounds."""
    total = sequence_sum(statistic) if statistic.ndim == 2 else sums.tokens * statistic
    # Counted from the bound nearest to 0: values of two policies that agree add nothing, not even rounding.
    clamped = statistic.clamp(rule.lower, rule.upper) - min(max(0.0, rule.lower), rule.upper)
    return RuleSums(
        sums.mean(total) if statistic.ndim == 2 else statistic,
        total,
        moments(clamped, sums.tokens),
        extremes(statistic, count),
        *sides,
    )


def _kept(causes: dict[str, Tensor], candidates: Tensor) -> Tensor:
    """1 for ``candidates`` that no cause rejects. Every cause applies to all of them, not to what another one
    has left."""
    if not causes:
        return candidates
    return indicator(torch.eq, sum(causes.values(), torch.zeros_like(candidates)), 0.0).mul_(candidates)
