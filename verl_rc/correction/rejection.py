"""Rejection rules: which tokens and rows the divergence between train and rollout policy excludes from the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule, RejectionRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.totals import Mean, Moments, RuleTotals

Means = dict[str, Mean[Tensor]]
"""By name of the metric what every row adds to a mean or a share."""


@dataclass(frozen=True)
class Judged:
    """What a rule found: per token ``[b, t]``, for ``seq_*`` rules per sequence, float64 ``[b]``."""

    statistic: Tensor
    above: Tensor
    """1 where the statistic is above its bounds, and 0 elsewhere."""
    below: Tensor


@dataclass(frozen=True)
class Rejection:
    """What each cause rejects (1, else 0). A cause is the name of a rule, ``veto``, ``opsm`` or ``nonfinite``."""

    tokens: dict[str, Tensor]
    """``[b, t]``: response tokens that are rejected by themselves."""
    rows: dict[str, Tensor]
    """``[b]``: rows that are rejected as a whole."""
    keep_tokens: Tensor
    """``[b, t]``: 1 for response tokens that are not rejected by themselves."""
    keep_rows: Tensor
    """bool ``[b]``: False for rows that are rejected as a whole."""
    kept_by_tokens: Tensor
    """float64 ``[b]``: response tokens that are not rejected by themselves."""
    judged: dict[str, Judged]
    """What each rule found."""

    @property
    def kept(self) -> Tensor:
        """float64 ``[b]``: response tokens that are kept."""
        return self.kept_by_tokens * self.keep_rows


def find_rejected(ratio: LogRatio, settings: CorrectionSettings, advantages: Tensor | None) -> Rejection:
    """Apply all rules to every token and sequence. Without valid tokens a sequence is rejected only for non-finite log-probs.

    ``advantages`` ``[b, t]`` are for the rule that depends on their sign; ``ValueError`` when they are missing. For tokens with
    non-finite log-probs rules see a ratio of 1 under ``nonfinite_logprob=neutral``, and no rule applies otherwise.
    """
    # Every cause applies to all sampled tokens, not to what another one has left: their order does not matter.
    tokens, rows, found = dict[str, Tensor](), dict[str, Tensor](), dict[str, Judged]()
    judged = ratio.response if settings.nonfinite == "neutral" else ratio.ones
    for rule in settings.rules:
        statistic = rule_statistic(rule.rule, ratio)
        above, below = indicator(torch.gt, statistic, rule.upper), indicator(torch.lt, statistic, rule.lower)
        found[rule.name] = Judged(statistic, above, below)
        if rule.rule.is_per_token:
            tokens[rule.name] = (above + below).mul_(judged)
        else:
            rows[rule.name] = (above + below).mul_(ratio.real)
    if settings.opsm_threshold is not None:
        if advantages is None:
            threshold = f"rollout_opsm_threshold={settings.opsm_threshold}"
            raise ValueError(f"{threshold} looks at the sign of the advantages: pass advantages [B, T]")
        # Off-policy sequence masking (DeepSeek-V3.2, arXiv:2512.02556, equation 9) drops negative samples that the trained
        # policy no longer produces: A_t < 0 where mean_t log(pi_rollout / pi_train) is above the threshold.
        drifted = -ratio.mean(ratio.sums) > settings.opsm_threshold
        tokens["opsm"] = ratio.response * ((advantages < 0) & drifted[:, None])
    if settings.log_veto is not None:
        # Unbounded log-ratios are compared: a veto may lie beyond the safety bound.
        rows["veto"] = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto)).clamp_max(1.0)
    if settings.nonfinite == "reject_token":
        tokens["nonfinite"] = ratio.response - ratio.ones
    elif settings.nonfinite == "reject_sequence":
        rows["nonfinite"] = (ratio.tokens < ratio.response_tokens).double()
    keep_tokens, kept = ratio.response, ratio.response_tokens
    if tokens:
        keep_tokens = indicator(torch.eq, _num_causes(tokens, ratio.ones), 0.0).mul_(ratio.response)
        kept = keep_tokens.sum(dim=-1).double()
    return Rejection(tokens, rows, keep_tokens, _num_causes(rows, ratio.tokens) == 0, kept, found)


def _num_causes(causes: dict[str, Tensor], like: Tensor) -> Tensor:
    """How many of some causes reject each token, or each row."""
    return sum(causes.values(), torch.zeros_like(like))


def rule_statistic(rule: RejectionRule, ratio: LogRatio) -> Tensor:
    """The statistic of a rule: per token ``[b, t]``, or its sum, mean or maximum in each sequence ``[b]``, 0 for an empty one."""
    of_tokens = ratio.divergence(rule.divergence)
    if rule.scope == "token":
        return of_tokens
    if rule.scope == "seq_max":
        return extremes(of_tokens, ratio.ones).largest.clamp_min(0.0)  # all of them are >= 0
    total = sequence_sum(of_tokens)
    return total if rule.scope == "seq_sum" else ratio.mean(total)


def rule_totals(rule: BoundedRule, ratio: LogRatio, rejection: Rejection) -> tuple[RuleTotals[Tensor], Means]:
    """What every row adds to the statistics of a rule, and to the metrics that are means or shares.

    Sums over tokens take the statistic of a ``seq_*`` rule for each token of the row.
    """
    found = rejection.judged[rule.name]
    tokens, real, statistic = ratio.tokens, ratio.real, found.statistic
    # Clamped values are counted from the bound nearest to 0: those of two policies that agree add nothing, not even rounding.
    clamped = statistic.clamp(rule.lower, rule.upper) - min(max(0.0, rule.lower), rule.upper)
    if rule.rule.is_per_token:
        clamped, total, seen = clamped * ratio.ones, sequence_sum(statistic), extremes(statistic, ratio.ones)
        row, moments = ratio.mean(total), Moments(sequence_sum(clamped), tokens, sequence_sum(clamped.square()))
        above, below = ratio.count(found.above), ratio.count(found.below)
        judged, rejected = tokens, above + below
    else:
        row, total, seen = statistic, tokens * statistic, extremes(statistic, tokens)
        moments = Moments(tokens * clamped, tokens, tokens * clamped.square())
        above, below = real * found.above, real * found.below
        judged, rejected = real, tokens * (above + below)
    rows_above, rows_below = real * (row > rule.upper), real * (row < rule.lower)
    if rule.rule.bounds_ratio:  # k1 is minus the log-ratio: where it is small, the ratio is high
        above, below, rows_above, rows_below = below, above, rows_below, rows_above
    name = f"rollout_rs_{rule.name}"
    means = {
        f"{name}_mean": Mean(total, tokens),
        f"{name}_masked_fraction": Mean(rejected, tokens),
        f"{name}_seq_masked_fraction": Mean(rejected > 0, real),
        f"{name}_fraction_high": Mean(above, judged),
        f"{name}_fraction_low": Mean(below, judged),
        f"{name}_seq_fraction_high": Mean(rows_above, real),
    }
    if rule.rule.bounds_ratio:
        means[f"{name}_seq_fraction_low"] = Mean(rows_below, real)
    of_rows = Moments(real * row, real, real * row.square())
    return RuleTotals(moments, seen, of_rows, extremes(row, tokens)), means


def rejection_means(ratio: LogRatio, rejection: Rejection, settings: CorrectionSettings) -> Means:
    """Shares of tokens and rows that are rejected, by all causes together and by those beside the rules."""
    means: Means = {}
    response, kept, answered = ratio.response_tokens, rejection.kept, ratio.response_tokens.clamp_max(1.0)
    if settings.rejects:
        means["rollout_rs_masked_fraction"] = Mean(response - kept, response)
        means["rollout_rs_seq_masked_fraction"] = Mean(kept < response, answered)
        means["rollout_rs_seq_rejected_fraction"] = Mean(answered * (kept == 0), answered)
    if settings.log_veto is not None:
        vetoing = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto))
        means["rollout_is_veto_fraction"] = Mean(rejection.rows["veto"], ratio.real)
        means["rollout_is_catastrophic_token_fraction"] = Mean(vetoing, ratio.tokens)
    if settings.opsm_threshold is not None:
        rejected = sequence_sum(rejection.tokens["opsm"])
        means["rollout_rs_opsm_masked_fraction"] = Mean(rejected, response)
        means["rollout_rs_opsm_seq_masked_fraction"] = Mean(rejected > 0, answered)
    return means


def exclusive_fractions(ratio: LogRatio, rejection: Rejection) -> Means:
    """Share of response tokens that one cause alone rejects, so that they would be kept without it; and that several reject."""
    # A token is lost by itself or with its row: a cause is alone where it is the only one at both levels.
    once_tokens, once_rows = _num_causes(rejection.tokens, ratio.ones) == 1, _num_causes(rejection.rows, ratio.tokens) == 1
    only = {name: rejection.kept_by_tokens * rejected * once_rows for name, rejected in rejection.rows.items()}
    only |= {name: rejection.keep_rows * sequence_sum(rejected * once_tokens) for name, rejected in rejection.tokens.items()}
    response = ratio.response_tokens
    fractions = {f"rollout_rs_{name}_exclusive_fraction": Mean(alone, response) for name, alone in only.items()}
    return {**fractions, "rollout_rs_overlap_fraction": Mean(response - rejection.kept - sum(only.values()), response)}
