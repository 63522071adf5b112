"""Rejection rules: which tokens and rows the divergence between train and rollout policy excludes from the loss."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule
from verl_rc.config.rollout_correction import CorrectionSettings
from verl_rc.correction.log_ratio import LogRatio, RowSums, row_sum
from verl_rc.correction.totals import Mean, Moments, RuleTotals

Means = dict[str, Mean[Tensor]]
"""By name of the metric what every row adds to a mean or a share."""


@dataclass(frozen=True)
class Verdict:
    """What is rejected of some rows, 1, else 0, by cause: the name of a rule, ``veto``, ``opsm`` or ``nonfinite``."""

    tokens: dict[str, Tensor]
    """``[b, t]``: response tokens that are rejected by themselves."""
    rows: dict[str, Tensor]
    """float64 ``[b]``: rows that are rejected as a whole."""
    keep_tokens: Tensor | None
    """``[b, t]``: 0 for tokens that are rejected by themselves, 1 elsewhere. None: there are none."""
    keep_rows: Tensor
    """float64 ``[b]``: 1 for rows that no cause rejects as a whole."""
    response_tokens: Tensor
    kept_by_tokens: Tensor
    """float64 ``[b]``: response tokens that are not rejected by themselves."""

    @property
    def kept(self) -> Tensor:
        """float64 ``[b]``: response tokens that are kept."""
        return self.kept_by_tokens * self.keep_rows

    @property
    def rejected_rows(self) -> Tensor:
        """bool ``[b]``: rows with response tokens of which none is kept."""
        return (self.response_tokens > 0) & (self.kept == 0)


def judge(ratio: LogRatio, settings: CorrectionSettings, statistics: dict[str, Tensor], advantages: Tensor | None) -> Verdict:
    """Judge every token and every row by itself. Rows without valid tokens are rejected only for log-probs that are not finite.

    ``statistics`` are those of the ``seq_*`` rules. ``advantages`` ``[b, t]`` serve the rule that looks at their sign;
    ``ValueError`` when it misses them. Tokens without finite log-probs are judged like a ratio of 1 under
    ``nonfinite_logprob=neutral``, and else by no rule.
    """
    tokens: dict[str, Tensor] = {}
    rows: dict[str, Tensor] = {}
    for rule in settings.rules:
        if rule.rule.is_per_token:
            statistic = ratio.divergence(rule.rule.divergence)
            outside = ratio.holds(torch.gt, statistic, rule.upper) + ratio.holds(torch.lt, statistic, rule.lower)
            tokens[rule.name] = outside.mul_(ratio.response if settings.nonfinite == "neutral" else ratio.ones)
        else:
            row = statistics[rule.name]
            rows[rule.name] = ratio.rows.real * ((row > rule.upper) | (row < rule.lower))
    if settings.opsm_threshold is not None:
        tokens["opsm"] = _opsm(ratio, settings.opsm_threshold, advantages)
    if settings.log_veto is not None:
        rows["veto"] = ratio.count(torch.lt, ratio.values, settings.log_veto).clamp_max(1.0)
    if settings.nonfinite == "reject_token":
        tokens["nonfinite"] = ratio.response - ratio.ones
    elif settings.nonfinite == "reject_sequence":
        rows["nonfinite"] = (ratio.rows.tokens < ratio.rows.response_tokens).double()
    keep_rows = (_times(rows) == 0).double() if rows else torch.ones_like(ratio.rows.tokens)
    if not tokens:
        return Verdict(tokens, rows, None, keep_rows, ratio.rows.response_tokens, ratio.rows.response_tokens)
    keep = ratio.holds(torch.eq, _times(tokens), 0.0)
    return Verdict(tokens, rows, keep, keep_rows, ratio.rows.response_tokens, row_sum(keep * ratio.response))


def _times(causes: dict[str, Tensor]) -> Tensor:
    """How many of some causes reject each token, or each row."""
    first, *others = causes.values()
    return torch.stack([first, *others]).sum(dim=0) if others else first


def row_statistics(ratio: LogRatio, settings: CorrectionSettings) -> dict[str, Tensor]:
    """The statistics ``[b]`` of the ``seq_*`` rules: sum, mean or maximum over a row's tokens; 0 for a row without any."""
    statistics = {}
    for rule in settings.rules:
        of_tokens, scope = ratio.divergence(rule.rule.divergence), rule.rule.scope
        if scope == "seq_max":
            statistics[rule.name] = ratio.extremes(of_tokens).largest.clamp_min(0.0)  # all of them are >= 0
        elif scope != "token":
            total = row_sum(of_tokens)
            statistics[rule.name] = total if scope == "seq_sum" else ratio.rows.mean(total)
    return statistics


def _opsm(ratio: LogRatio, threshold: float, advantages: Tensor | None) -> Tensor:
    """What off-policy sequence masking rejects (DeepSeek-V3.2, arXiv:2512.02556, equation 9).

    ``A_t < 0`` and ``mean_t log(pi_rollout / pi_train) > threshold`` (nats) over the row's valid tokens: negative samples that
    the trained policy no longer produces.
    """
    if advantages is None:
        raise ValueError(f"rollout_opsm_threshold={threshold} looks at the sign of the advantages: pass advantages [B, T]")
    drifted = -ratio.rows.mean(ratio.rows.log_ratio) > threshold
    return ratio.holds(torch.lt, advantages, 0.0).mul_(ratio.response).mul_(drifted[:, None])


def rule_totals(
    rule: BoundedRule, rows: RowSums, statistic: Tensor, ratio: LogRatio | None = None
) -> tuple[RuleTotals[Tensor], Means]:
    """What every row adds to the statistics of a rule, and to the metrics that are means or shares.

    ``statistic`` is that of tokens ``[b, t]``, of which ``ratio`` knows which are valid; or of a ``seq_*`` rule that of rows,
    which sums over tokens take for each token of the row.
    """
    tokens, real, name = rows.tokens, rows.real, f"rollout_rs_{rule.name}"
    # Clamped values are counted from the bound nearest to 0: those of two policies that agree add nothing, not even rounding.
    clamped = statistic.clamp(rule.lower, rule.upper) - min(max(0.0, rule.lower), rule.upper)
    if ratio is None:
        row, total, level, extremes = statistic, tokens * statistic, real, rows.extremes(statistic)
        moments = Moments(tokens * clamped, tokens, tokens * clamped.square())
        above, below = real * (row > rule.upper), real * (row < rule.lower)
        rejected = tokens * (above + below)
    else:
        clamped, total, level, extremes = clamped * ratio.ones, row_sum(statistic), tokens, ratio.extremes(statistic)
        row, moments = rows.mean(total), Moments(row_sum(clamped), tokens, row_sum(clamped.square()))
        above, below = ratio.count(torch.gt, statistic, rule.upper), ratio.count(torch.lt, statistic, rule.lower)
        rejected = above + below
    rows_above, rows_below = real * (row > rule.upper), real * (row < rule.lower)
    if rule.rule.bounds_ratio:  # k1 is minus the log-ratio: where it is small, the ratio is high
        above, below, rows_above, rows_below = below, above, rows_below, rows_above
    means = {
        f"{name}_mean": Mean(total, tokens),
        f"{name}_masked_fraction": Mean(rejected, tokens),
        f"{name}_seq_masked_fraction": Mean(rejected > 0, real),
        f"{name}_fraction_high": Mean(above, level),
        f"{name}_fraction_low": Mean(below, level),
        f"{name}_seq_fraction_high": Mean(rows_above, real),
    }
    if rule.rule.bounds_ratio:
        means[f"{name}_seq_fraction_low"] = Mean(rows_below, real)
    return RuleTotals(moments, extremes, Moments(real * row, real, real * row.square()), rows.extremes(row)), means


def cause_means(ratio: LogRatio, verdict: Verdict, settings: CorrectionSettings) -> Means:
    """Shares of tokens and rows that the causes beside the rules find."""
    means, rows, response = {}, ratio.rows, ratio.rows.response_tokens
    if settings.log_veto is not None:
        means["rollout_is_veto_fraction"] = Mean(verdict.rows["veto"], rows.real)
        vetoing = ratio.count(torch.lt, ratio.values, settings.log_veto)
        means["rollout_is_catastrophic_token_fraction"] = Mean(vetoing, rows.tokens)
    if settings.opsm_threshold is not None:
        rejected = row_sum(verdict.tokens["opsm"])
        means["rollout_rs_opsm_masked_fraction"] = Mean(rejected, response)
        means["rollout_rs_opsm_seq_masked_fraction"] = Mean(rejected > 0, response > 0)
    return means


def exclusive_fractions(ratio: LogRatio, verdict: Verdict) -> Means:
    """Share of response tokens that one cause alone rejects, so that they would be kept without it; and that several reject."""
    only = {}
    if verdict.rows:
        once = _times(verdict.rows) == 1
        only = {name: verdict.kept_by_tokens * rejected * once for name, rejected in verdict.rows.items()}
    if verdict.tokens:
        once = ratio.holds(torch.eq, _times(verdict.tokens), 1.0)
        only |= {name: verdict.keep_rows * row_sum(rejected * once) for name, rejected in verdict.tokens.items()}
    response = ratio.rows.response_tokens
    fractions = {f"rollout_rs_{name}_exclusive_fraction": Mean(alone, response) for name, alone in only.items()}
    return {**fractions, "rollout_rs_overlap_fraction": Mean(response - verdict.kept - sum(only.values()), response)}
