"""MEASURE: everything the metrics, and the normalisation of weights, need to know about some rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.accounting import accounting_sums
from verl_rc.correction.context import RowContext
from verl_rc.correction.histogram import NUM_BINS, log_ratio_histogram
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogProbs
from verl_rc.correction.rejection import BoundedRule, row_keep, row_statistic
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns, real_rows
from verl_rc.correction.statistics import CorrectionStatistics
from verl_rc.correction.sweep import sweep
from verl_rc.correction.weight_statistics import prompt_columns, weight_maxima, weight_sums


def measure(
    train_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    config: RolloutCorrectionConfig | Mapping[str, object],
    context: RowContext | None = None,
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats), before any rejection. Rows without response tokens never count.

    ``train_log_probs`` are those of the proximal policy (decoupled) or of the current one (bypass). Raises ``ValueError`` when
    shapes differ.
    """
    log_probs, resolved = LogProbs(train_log_probs, rollout_log_probs, response_mask), ResolvedCorrection.of(config)
    context = context or RowContext()
    context.check(train_log_probs.shape)
    with torch.no_grad():
        return statistics_of(*sweep(log_probs, resolved, context), resolved, context)


def statistics_of(
    columns: Columns, histogram: Tensor | None, resolved: ResolvedCorrection, context: RowContext
) -> CorrectionStatistics:
    """Statistics of all rows from their columns and, with full diagnostics, the histogram of their log-ratios."""
    kept_rows = row_keep(columns, resolved.rules, resolved.config)
    sums, maxima = _gap(columns, resolved.full)
    if resolved.threshold is not None:
        sums |= weight_sums(columns, resolved)
        maxima |= weight_maxima(columns, resolved)
        if resolved.full:
            sums |= prompt_columns(columns, resolved, context.group_slots)
    for bounded in resolved.rules:
        rule_sums, rule_maxima = _rule(columns, bounded)
        sums |= rule_sums
        maxima |= rule_maxima
    sums |= accounting_sums(columns, kept_rows, resolved, context.scores)
    return CorrectionStatistics.from_columns(sums, maxima, _histograms(columns, histogram))


def _gap(columns: Columns, full: bool) -> tuple[Columns, Columns]:
    """How far the policies are apart: every row's share in the sums, and its extremes."""
    real, tokens = real_rows(columns), columns["tokens"].clamp_min(1.0)
    train, difference = columns["train"] / tokens, -columns["log_ratio"] / tokens
    rollout = train + difference
    bounded_sums = columns["log_ratio"].clamp(-SAFETY_BOUND, SAFETY_BOUND)
    per_row = {
        "rows": torch.ones_like(tokens),
        "training_ppl": (-train).exp(),
        "training_log_ppl": -train,
        "rollout_ppl": (-rollout).exp(),
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_seq": torch.expm1(2.0 * bounded_sums),
        "safety_clamped_rows": (columns["log_ratio"].abs() > SAFETY_BOUND).double(),
    }
    sums = {name: torch.where(real, column, 0.0) for name, column in per_row.items()}
    sums |= {
        "tokens": columns["tokens"],
        "response_tokens": columns["response_tokens"],
        "nonfinite_tokens": columns["response_tokens"] - columns["tokens"],
        "safety_clamped_tokens": columns["safety_clamped"],
        "kl": -columns["log_ratio"],
        "k3_kl": (columns["excess"] - columns["bounded"]).clamp_min(0.0),
        "chi2_token": columns["excess_square"] + 2.0 * columns["excess"],
        "ratio_excess": columns["excess"],
        "ratio_excess_square": columns["excess_square"],
    }
    maxima = _extremes("log_ppl_diff", difference, real)
    if full:
        sequence_excess = torch.expm1(bounded_sums)
        sums |= {
            "exact_tokens": columns["exact"],
            "sequence_excess": torch.where(real, sequence_excess, 0.0),
            "sequence_excess_square": torch.where(real, sequence_excess.square(), 0.0),
            "age": columns["age"],
            **_bucket_sums(columns, "age"),
            **_bucket_sums(columns, "turn"),
        }
        maxima["log_ratio_abs"] = torch.maximum(columns["log_ratio.max"], columns["negated_log_ratio.max"])
        maxima["age"] = columns["age.max"]
    return sums, maxima


def _bucket_sums(columns: Columns, name: str) -> Columns:
    """``<name>_0.tokens`` and so on."""
    parts = ("tokens", "log_ratio", "k3")
    return {f"{name}_{n}.{part}": sums for part in parts for n, sums in enumerate(columns[f"{name}_buckets.{part}"].unbind())}


def _rule(columns: Columns, bounded: BoundedRule) -> tuple[Columns, Columns]:
    """One rule's statistic. Token sums of a ``seq_*`` rule take the row's value on each of its tokens."""
    real, tokens, name = real_rows(columns), columns["tokens"], f"rs.{bounded.name}"
    column = f"rule.{bounded.name}"
    if bounded.rule.is_per_token:
        row = columns[f"{column}.total"] / tokens.clamp_min(1.0)
        totals = {part: columns[f"{column}.{part}"] for part in ("total", "clamped", "clamped_square", "high", "low")}
        rejected = totals["high"] + totals["low"]
        maxima = {f"{name}.max": columns[f"{column}.statistic.max"], f"{name}.negated_min": columns[f"{column}.negated.max"]}
    else:
        row = row_statistic(bounded.rule, columns)
        clamped = bounded.clamp(row) - bounded.clamped_zero
        high, low = (real & beyond for beyond in bounded.beyond(row))
        totals = {"total": tokens * row, "clamped": tokens * clamped, "clamped_square": tokens * clamped.square()}
        totals |= {"high": high.double(), "low": low.double()}
        rejected = tokens * (totals["high"] + totals["low"])
        maxima = _extremes(name, row, real)
    row_high, row_low = bounded.beyond(row)
    sums = {f"{name}.{part}": total for part, total in totals.items()}
    sums |= {
        f"{name}.rejected_tokens": rejected,
        f"{name}.touched_rows": (rejected > 0).double(),
        f"{name}.row_high": (real & row_high).double(),
        f"{name}.row_low": (real & row_low).double(),
        f"{name}.row.sum": torch.where(real, row, 0.0),
        f"{name}.row.square": torch.where(real, row.square(), 0.0),
    }
    return sums, maxima | _extremes(f"{name}.row", row, real)


def _extremes(name: str, column: Tensor, where: Tensor) -> Columns:
    return {
        f"{name}.max": column.masked_fill(~where, -torch.inf),
        f"{name}.negated_min": (-column).masked_fill(~where, -torch.inf),
    }


def _histograms(columns: Columns, tokens: Tensor | None) -> Tensor:
    """Of token log-ratios, of rows' sums and of rows' means; no row at all without full diagnostics."""
    if tokens is None:
        return columns["tokens"].new_zeros(0, NUM_BINS)
    real, sums = real_rows(columns), columns["log_ratio"]
    means = sums / columns["tokens"].clamp_min(1.0)
    return torch.stack([tokens, log_ratio_histogram(sums, real), log_ratio_histogram(means, real)])
