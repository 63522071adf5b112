"""Rejection rules: which tokens and sequences the divergence between train and rollout policy excludes from
the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule, RejectionRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.totals import Means, RuleSums, RuleTotals, SequenceSums, TokenSums
from verl_rc.metrics.mean import Mean, Moments


@dataclass(frozen=True)
class Rejection:
    """Tokens ``[b, t]`` that are rejected by themselves, or sequences ``[B]`` that are rejected as a
    whole."""

    causes: dict[str, Tensor]
    """1 for those that a cause rejects, and 0 elsewhere. A cause is the name of a rule, ``veto``, ``opsm`` or
    ``nonfinite``."""
    kept: Tensor
    """1 for response tokens, or sequences, that no cause rejects, and 0 elsewhere."""

    @classmethod
    def from_causes(cls, causes: dict[str, Tensor], candidates: Tensor) -> "Rejection":
        """Decide for ``candidates``, 1 and 0. Every cause applies to all of them, not to what another one has
        left."""
        if not causes:
            return cls(causes, candidates)
        return cls(
            causes,
            indicator(torch.eq, sum(causes.values(), torch.zeros_like(candidates)), 0.0).mul_(candidates),
        )

    @property
    def alone(self) -> dict[str, Tensor]:
        """1 for those that a cause alone rejects, by cause."""
        once = indicator(torch.eq, sum(self.causes.values(), torch.zeros_like(self.kept)), 1.0)
        return {name: rejected * once for name, rejected in self.causes.items()}


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


def reject_tokens(
    ratio: LogRatio, settings: CorrectionSettings, advantages: Tensor | None
) -> tuple[Rejection, dict[str, RuleSums]]:
    """Apply all rules that look at single tokens; also returns what these found.

    ``advantages`` ``[b, t]`` are for the rule that depends on their sign; ``ValueError`` when they are
    missing. For tokens with non-finite log-probs rules see a ratio of 1 under ``nonfinite_logprob=neutral``,
    and no rule applies otherwise.
    """
    causes, found = dict[str, Tensor](), dict[str, RuleSums]()
    judged = ratio.response if settings.nonfinite == "neutral" else ratio.ones
    for rule in settings.rules:
        if rule.rule.is_per_token:
            statistic = rule_statistic(rule.rule, ratio)
            above, below = _outside(rule, statistic)
            found[rule.name] = _token_rule_sums(rule, ratio, statistic, above, below)
            causes[rule.name] = above.add_(below).mul_(judged)
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
    return Rejection.from_causes(causes, ratio.response), found


def reject_sequences(found: TokenSums, settings: CorrectionSettings) -> Rejection:
    """Apply all rules that look at whole sequences. Without valid tokens one is rejected only for non-finite
    log-probs."""
    causes, sums = dict[str, Tensor](), found.sums
    for rule in settings.rules:
        if not rule.rule.is_per_token:
            above, below = _outside(rule, found.statistics[rule.name])
            causes[rule.name] = above.add_(below).mul_(sums.real)
    if found.below_veto is not None:
        causes["veto"] = found.below_veto.clamp_max(1.0)
    if settings.nonfinite == "reject_sequence":
        causes["nonfinite"] = indicator(torch.lt, sums.tokens, sums.response_tokens)
    return Rejection.from_causes(causes, torch.ones_like(sums.tokens))


def _outside(rule: BoundedRule, statistic: Tensor) -> tuple[Tensor, Tensor]:
    """1 where a statistic is above the rule's bounds, and 1 where it is below; 0 elsewhere."""
    return indicator(torch.gt, statistic, rule.upper), indicator(torch.lt, statistic, rule.lower)


def _token_rule_sums(
    rule: BoundedRule, ratio: LogRatio, statistic: Tensor, above: Tensor, below: Tensor
) -> RuleSums:
    total, seen = sequence_sum(statistic), extremes(statistic, ratio.ones)
    clamped = _clamped(rule, statistic).mul_(ratio.ones)
    moments = Moments(sequence_sum(clamped), ratio.sums.tokens, sequence_sum(clamped.square()))
    return RuleSums(ratio.sums.mean(total), total, moments, seen, ratio.count(above), ratio.count(below))


def _sequence_rule_sums(rule: BoundedRule, sums: SequenceSums, statistic: Tensor) -> RuleSums:
    # Every token counts with the statistic of its sequence.
    tokens, clamped, (above, below) = sums.tokens, _clamped(rule, statistic), _outside(rule, statistic)
    moments, seen = Moments(tokens * clamped, tokens, tokens * clamped.square()), extremes(statistic, tokens)
    return RuleSums(statistic, tokens * statistic, moments, seen, sums.real * above, sums.real * below)


def _clamped(rule: BoundedRule, statistic: Tensor) -> Tensor:
    # Counted from the bound nearest to 0: values of two policies that agree add nothing, not even rounding.
    return statistic.clamp(rule.lower, rule.upper) - min(max(0.0, rule.lower), rule.upper)


def rule_totals(rule: BoundedRule, found: TokenSums) -> tuple[RuleTotals[Tensor], Means[Tensor]]:
    """What every sequence adds to the statistics of a rule, and to the metrics that are means or shares."""
    tokens, real = found.sums.tokens, found.sums.real
    if rule.rule.is_per_token:
        of_rule, judged = found.rules[rule.name], tokens
        rejected = of_rule.above + of_rule.below
    else:
        of_rule, judged = _sequence_rule_sums(rule, found.sums, found.statistics[rule.name]), real
        rejected = tokens * (of_rule.above + of_rule.below)
    mean, (above, below) = of_rule.mean, (of_rule.above, of_rule.below)
    seq_above, seq_below = (real * some for some in _outside(rule, mean))
    if rule.rule.bounds_ratio:  # k1 is minus the log-ratio: where it is small, the ratio is high
        above, below, seq_above, seq_below = below, above, seq_below, seq_above
    name = f"rollout_rs_{rule.name}"
    means = {
        f"{name}_mean": Mean(of_rule.total, tokens),
        f"{name}_masked_fraction": Mean(rejected, tokens),
        f"{name}_seq_masked_fraction": Mean(rejected > 0, real),
        f"{name}_fraction_high": Mean(above, judged),
        f"{name}_fraction_low": Mean(below, judged),
        f"{name}_seq_fraction_high": Mean(seq_above, real),
    }
    if rule.rule.bounds_ratio:
        means[f"{name}_seq_fraction_low"] = Mean(seq_below, real)
    of_sequences = Moments(real * mean, real, real * mean.square())
    return RuleTotals(of_rule.clamped, of_rule.extremes, of_sequences, extremes(mean, tokens)), means


def rejection_means(found: TokenSums, kept: Tensor, settings: CorrectionSettings) -> Means[Tensor]:
    """Shares of tokens and sequences that are rejected, by all causes together and by the veto; ``kept``
    tokens are left."""
    means, response = dict[str, Mean[Tensor]](), found.sums.response_tokens
    answered = response.clamp_max(1.0)
    if settings.rejects:
        means["rollout_rs_masked_fraction"] = Mean(response - kept, response)
        means["rollout_rs_seq_masked_fraction"] = Mean(kept < response, answered)
        means["rollout_rs_seq_rejected_fraction"] = Mean(answered * (kept == 0), answered)
    if found.below_veto is not None:
        means["rollout_is_veto_fraction"] = Mean(found.below_veto.clamp_max(1.0), found.sums.real)
        means["rollout_is_catastrophic_token_fraction"] = Mean(found.below_veto, found.sums.tokens)
    return means


def exclusive_fractions(found: TokenSums, rejection: Rejection) -> Means[Tensor]:
    """Share of response tokens that one cause alone rejects, so that they would be kept without it; and that
    several reject."""
    # A token is lost by itself or with its sequence: a cause is alone where it is the only one at both
    # levels.
    only = {name: found.kept * rejected for name, rejected in rejection.alone.items()}
    only |= {name: rejection.kept * tokens for name, tokens in found.alone.items()}
    response = found.sums.response_tokens
    fractions = {
        f"rollout_rs_{name}_exclusive_fraction": Mean(tokens, response) for name, tokens in only.items()
    }
    overlap = response - rejection.kept * found.kept - sum(only.values())
    return {**fractions, "rollout_rs_overlap_fraction": Mean(overlap, response)}
