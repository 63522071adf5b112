"""One pass over the tokens of some rows: what every row adds up to. Everything else is computed from these columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.chunks import RowChunks, is_on_host
from verl_rc.correction.importance import bounded_excess, token_log_weights
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, holds, row_count, row_sum, true_per_row
from verl_rc.correction.rejection import BoundedRule, row_aggregates
from verl_rc.correction.resolved import ResolvedCorrection

Columns = dict[str, Tensor]
"""Columns ``[B]``, or several as ``[n, B]``, by name, float64 once they are joined: sums over a row's valid tokens; ``*.max``
are largest values (-inf: no token)."""


@dataclass(frozen=True)
class TokenWeights:
    """Weights ``w`` of a level at which every token has its own, of some rows; ``w - 1`` is exact near 1."""

    logs: Tensor
    """``[B, T]``: unbounded logarithms of the raw weights; 0 where no token is valid."""
    raw_excess: Tensor
    """float64 ``[B, T]``: ``w - 1`` before the threshold; 0 where no token is valid."""
    excess: Tensor
    """float64 ``[B, T]``: ``w - 1`` after the threshold, before normalisation; 0 where no token is valid."""
    applied: Tensor
    """float64 ``[B, T]``: ``w`` after the threshold, before normalisation; 0 where no token is valid."""
    written: Tensor
    """float64 ``[B, T]``: the same, with what ``nonfinite_logprob=neutral`` gives to tokens that are not valid."""

    @classmethod
    def of(cls, ratio: LogRatio, resolved: ResolvedCorrection) -> "TokenWeights":
        """Weights of level ``token`` or ``prefix``."""
        config, threshold = resolved.config, resolved.threshold
        assert threshold is not None
        logs, prefix = token_log_weights(ratio, config), config.rollout_is == "prefix"
        raw = torch.expm1(logs.clamp(-SAFETY_BOUND, SAFETY_BOUND)) if prefix else ratio.excess
        excess = bounded_excess(raw, threshold)
        neutral = (excess + 1.0).mul_(ratio.response) if config.nonfinite_logprob == "neutral" else None
        if prefix:
            logs, raw = logs * ratio.ones, raw * ratio.ones
        if prefix or not threshold.keeps_one:
            excess = excess * ratio.ones
        applied = excess + ratio.ones
        return cls(logs, raw, excess, applied, applied if neutral is None else neutral)


def deciding_columns(ratio: LogRatio, rules: list[BoundedRule], config: RolloutCorrectionConfig) -> Columns:
    """What decides over whole rows: their weight and whether they are kept."""
    columns = {
        "tokens": ratio.tokens,
        "response_tokens": ratio.response_tokens,
        "log_ratio": row_sum(ratio.values),
        **row_aggregates(ratio, rules),
    }
    if config.rollout_token_veto_threshold is not None:
        columns["negated_log_ratio.max"] = ratio.negated_lowest
        columns["catastrophic"] = ratio.count_below(ratio.values, math.log(config.rollout_token_veto_threshold))
    return columns


def describing_columns(ratio: LogRatio, full: bool) -> Columns:
    """What describes the gap between the policies, whatever is done about it."""
    columns = {
        "train": row_sum(ratio.train),
        "bounded": row_sum(ratio.precise),
        "excess": row_sum(ratio.excess),
        "excess_square": vecdot(ratio.excess, ratio.excess),
        "safety_clamped": row_count(holds(torch.ne, ratio.values, ratio.bounded)),
    }
    if full:
        columns |= {
            "exact": ratio.tokens - row_count(holds(torch.ne, ratio.values, 0.0)),
            "log_ratio.max": ratio.highest,
            "negated_log_ratio.max": ratio.negated_lowest,
        }
    return columns


def weight_columns(ratio: LogRatio, weights: TokenWeights, threshold: Threshold, full: bool) -> Columns:
    """Sums and extremes of token-level weights; ``excess`` is ``w - 1``."""
    of_tokens = weights.logs is ratio.values
    columns = {
        "weight.log.max": ratio.highest if of_tokens else ratio.row_max(weights.logs),
        "weight.negated_log.max": ratio.negated_lowest if of_tokens else ratio.row_negated_min(weights.logs),
        "weight.raw_excess": row_sum(weights.raw_excess),
        "weight.excess": row_sum(weights.excess),
        "weight.excess_square": vecdot(weights.excess, weights.excess),
        "weight.square": vecdot(weights.applied, weights.applied),
        "weight.high": ratio.count_above(weights.logs, math.log(threshold.upper)),
        "weight.low": ratio.count_below(weights.logs, math.log(threshold.reciprocal_lower)),
    }
    if threshold.lower is not None:  # a band puts both ends to 0; truncation leaves them the largest and the smallest
        columns["weight.max"] = ratio.row_max(weights.applied)
        columns["weight.negated.max"] = ratio.row_negated_min(weights.applied)
    if full:
        raw = weights.raw_excess + ratio.ones
        columns |= {
            "weight.raw_excess_square": vecdot(weights.raw_excess, weights.raw_excess),
            "weight.raw_square": vecdot(raw, raw),
        }
    return columns


def token_rule_columns(ratio: LogRatio, bounded: BoundedRule) -> Columns:
    """Sums, extremes and counts of the statistic of a token rule; ``clamped`` is counted from ``bounded.clamped_zero``."""
    divergence, name = bounded.rule.divergence, f"rule.{bounded.name}"
    statistic, (largest, negated_smallest) = ratio.divergence(divergence), ratio.extremes(divergence)
    clamped = bounded.clamp(statistic)
    if bounded.clamped_zero:
        clamped = (clamped - bounded.clamped_zero).mul_(ratio.ones)
    above = ratio.count_above(statistic, bounded.upper)
    below = torch.zeros_like(above) if bounded.lower is None else ratio.count_below(statistic, bounded.lower)
    high, low = (above, below) if bounded.lower is None else (below, above)
    return {
        f"{name}.total": row_sum(statistic),
        f"{name}.clamped": row_sum(clamped),
        f"{name}.clamped_square": row_sum(clamped.square_()),
        f"{name}.statistic.max": largest,
        f"{name}.negated.max": negated_smallest,
        f"{name}.high": high,
        f"{name}.low": low,
    }


def age_columns(ratio: LogRatio, ages: Tensor | None, buckets: int) -> Columns:
    """Tokens, log-ratios and k3 by age (int ``[B, T]``, updates) of the weights that sampled them.

    The last bucket holds all older tokens too; without ``ages`` nothing counts.
    """
    if ages is None:
        nothing = ratio.tokens.new_zeros(3, buckets, len(ratio.tokens))
        return {"age": nothing[0, 0], "age.max": nothing[0, 0] - torch.inf, **_bucket_columns("age", *nothing)}
    known, k3 = ages.double(), ratio.k3.to(ratio.values.dtype)
    bucketed = known.clamp(0, buckets - 1).to(ratio.values.dtype)
    parts = []
    for bucket in range(buckets):
        here = torch.eq(bucketed, bucket, out=torch.empty_like(bucketed)).mul_(ratio.ones)
        parts.append([row_sum(here), row_sum(here * ratio.values), row_sum(here * k3)])
    columns = {"age": row_sum(known * ratio.ones), "age.max": ratio.row_max(known)}
    return columns | _bucket_columns("age", *(torch.stack(part) for part in zip(*parts, strict=True)))


def turn_columns(ratio: LogRatio, buckets: int) -> Columns:
    """Tokens, log-ratios and k3 by turn: a run of response tokens without a tool's between them.

    The last bucket holds all later turns too. Turns follow each other, so the sum over one is what a running sum gains in it.
    """
    mask = ratio.response_mask
    rows, width = mask.shape
    if width == 0:
        return _bucket_columns("turn", *ratio.tokens.new_zeros(3, buckets, rows))
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    if is_on_host(begins) and not (true_per_row(begins) > 1).any():  # the usual case, and the running sums below are dear
        turns = ratio.tokens.new_zeros(3, buckets, rows)
        turns[:, 0] = torch.stack([ratio.tokens, row_sum(ratio.values), row_sum(ratio.k3)])
        return _bucket_columns("turn", *turns)
    later_turns = torch.arange(2, buckets + 1, dtype=torch.int32, device=mask.device).expand(rows, -1)
    next_begins = torch.searchsorted(begins.cumsum(dim=-1, dtype=torch.int32), later_turns.contiguous())
    ends = torch.nn.functional.pad(next_begins, (0, 1), value=width) - 1

    def gained(values: Tensor) -> Tensor:
        """float64 ``[buckets, B]``."""
        before = ratio.tokens.new_zeros(rows, 1)
        return values.cumsum(dim=-1, dtype=torch.float64).gather(-1, ends).diff(dim=-1, prepend=before).T

    return _bucket_columns("turn", gained(ratio.ones), gained(ratio.values), gained(ratio.k3))


def _bucket_columns(name: str, tokens: Tensor, log_ratio: Tensor, k3: Tensor) -> Columns:
    """Sums ``[buckets, B]`` by name."""
    return {f"{name}_buckets.tokens": tokens, f"{name}_buckets.log_ratio": log_ratio, f"{name}_buckets.k3": k3}


def join(parts: list[Columns], chunks: RowChunks) -> Columns:
    """The columns of all rows, from those of every chunk."""
    joined = chunks.join([torch.cat([_as_lines(column) for column in part.values()]) for part in parts]).double()
    columns, line = {}, 0
    for name, column in parts[0].items():
        count = len(_as_lines(column))
        columns[name] = joined[line : line + count] if column.ndim == 2 else joined[line]
        line += count
    return columns


def _as_lines(column: Tensor) -> Tensor:
    return column if column.ndim == 2 else column[None]


def real_rows(columns: Mapping[str, Tensor]) -> Tensor:
    """bool ``[B]``: rows with at least one valid token."""
    return columns["tokens"] > 0
