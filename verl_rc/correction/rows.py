"""One pass over the tokens of some rows: what every row adds up to. Everything else is computed from these columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vecdot

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.importance import bounded_weights, token_weights
from verl_rc.correction.log_ratio import LogRatio, row_sum
from verl_rc.correction.rejection import BoundedRule, row_aggregates

Columns = dict[str, Tensor]
"""Columns of float64 ``[B]`` by name: sums over a row's valid tokens; ``*.max`` are largest values (-inf: no token)."""


@dataclass(frozen=True)
class TokenWeights:
    """Weights of a level at which every token has its own, of some rows; anything may stand where no token is valid."""

    raw: Tensor
    """``[B, T]``: before the threshold."""
    applied: Tensor
    """``[B, T]``: after it, before normalisation."""
    raw_excess: Tensor
    """float64 ``[B, T]``: ``raw - 1``, 0 where no token is valid."""
    excess: Tensor
    """float64 ``[B, T]``: ``applied - 1``, 0 where no token is valid."""

    @classmethod
    def of(cls, ratio: LogRatio, level: str, threshold: Threshold) -> "TokenWeights":
        """Weights of ``level``, which is ``token`` or ``prefix``."""
        precise = token_weights(ratio, level)
        raw, applied = precise.to(ratio.values.dtype), bounded_weights(precise, threshold)
        raw_excess = ratio.excess if level == "token" else (precise - 1.0).mul_(ratio.ones)
        del precise  # memory peaks here
        excess = (applied - 1.0).mul_(ratio.ones)
        return cls(raw, applied.to(raw.dtype), raw_excess, excess)


def deciding_columns(ratio: LogRatio, rules: list[BoundedRule], config: RolloutCorrectionConfig) -> Columns:
    """What decides over whole rows: their weight and whether they are kept."""
    columns = {
        "tokens": ratio.tokens,
        "response_tokens": ratio.response_tokens,
        "log_ratio": row_sum(ratio.values),
        **row_aggregates(ratio, rules),
    }
    if config.rollout_token_veto_threshold is not None:
        columns["negated_log_ratio.max"] = ratio.row_max(-ratio.values)
        columns["catastrophic"] = ratio.count(torch.lt, ratio.values, math.log(config.rollout_token_veto_threshold))
    return columns


def describing_columns(ratio: LogRatio, full: bool) -> Columns:
    """What describes the gap between the policies, whatever is done about it."""
    bounded = ratio.bounded
    columns = {
        "train": row_sum(ratio.train),
        "bounded": row_sum(bounded),
        "excess": row_sum(ratio.excess),
        "excess_square": vecdot(ratio.excess, ratio.excess),
        "safety_clamped": ratio.count(torch.ne, ratio.values, bounded),
    }
    if full:
        columns |= {
            "exact": ratio.count(torch.eq, ratio.values, 0.0),
            "magnitude.max": ratio.row_max(ratio.values.abs()),
        }
    return columns


def weight_columns(ratio: LogRatio, weights: TokenWeights, threshold: Threshold, full: bool) -> Columns:
    """Sums and extremes of token-level weights; ``excess`` is ``w - 1``."""
    raw, applied = weights.raw, weights.applied
    columns = {
        "weight.raw_excess": row_sum(weights.raw_excess),
        "weight.excess": row_sum(weights.excess),
        "weight.excess_square": vecdot(weights.excess, weights.excess),
        "weight.square": row_sum((applied * ratio.ones).square_()),
        "weight.max": ratio.row_max(applied),
        "weight.negated.max": ratio.row_max(-applied),
        "weight.high": ratio.count(torch.gt, raw, threshold.upper),
        "weight.low": ratio.count(torch.lt, raw, threshold.reciprocal_lower),
    }
    if full:
        columns |= {
            "weight.raw_excess_square": vecdot(weights.raw_excess, weights.raw_excess),
            "weight.raw_square": row_sum((raw * ratio.ones).square_()),
            "weight.raw.max": ratio.row_max(raw),
            "weight.raw_negated.max": ratio.row_max(-raw),
        }
    return columns


def token_rule_columns(ratio: LogRatio, bounded: BoundedRule) -> Columns:
    """Sums, extremes and counts of the statistic of a token rule; ``clamped`` is counted from the upper bound."""
    statistic, name = ratio.divergence(bounded.rule.divergence), f"rule.{bounded.name}"
    clamped = (bounded.clamp(statistic) - bounded.upper) * ratio.ones
    high, low = bounded.limits
    return {
        f"{name}.total": row_sum(statistic),
        f"{name}.clamped": row_sum(clamped),
        f"{name}.clamped_square": row_sum(clamped.square_()),
        f"{name}.statistic.max": ratio.row_max(statistic),
        f"{name}.negated.max": ratio.row_max(-statistic),
        f"{name}.high": ratio.count(high.compare, statistic, high.bound),
        f"{name}.low": ratio.count(low.compare, statistic, low.bound),
    }


def age_columns(ratio: LogRatio, ages: Tensor | None, buckets: int) -> Columns:
    """Tokens, log-ratios and k3 by age (int ``[B, T]``, updates) of the weights that sampled them.

    The last bucket holds all older tokens too; without ``ages`` nothing counts.
    """
    if ages is None:
        nothing = ratio.tokens.new_zeros(len(ratio.tokens), buckets)
        unknown = {"age": nothing[:, 0], "age.max": nothing[:, 0] - torch.inf}
        return unknown | _bucket_columns("age", nothing, nothing, nothing)
    known, k3 = ages.double(), ratio.k3.to(ratio.values.dtype)
    bucketed = known.clamp(0, buckets - 1).to(ratio.values.dtype)
    parts = []
    for bucket in range(buckets):
        here = torch.eq(bucketed, bucket, out=torch.empty_like(bucketed)).mul_(ratio.ones)
        parts.append([row_sum(here), row_sum(here * ratio.values), row_sum(here * k3)])
    columns = {"age": row_sum(known * ratio.ones), "age.max": ratio.row_max(known)}
    return columns | _bucket_columns("age", *(torch.stack(part, dim=1) for part in zip(*parts, strict=True)))


def turn_columns(ratio: LogRatio, buckets: int) -> Columns:
    """Tokens, log-ratios and k3 by turn: a run of response tokens without a tool's between them.

    The last bucket holds all later turns too. Turns follow each other, so the sum over one is what a running sum gains in it.
    """
    mask = ratio.response_mask
    rows, width = mask.shape
    if width == 0:
        return _bucket_columns("turn", *(ratio.tokens.new_zeros(rows, buckets) for _ in range(3)))
    begins = mask & ~torch.nn.functional.pad(mask[:, :-1], (1, 0))
    later_turns = torch.arange(2, buckets + 1, dtype=torch.int32, device=mask.device).expand(rows, -1)
    next_begins = torch.searchsorted(begins.cumsum(dim=-1, dtype=torch.int32), later_turns.contiguous())
    ends = torch.nn.functional.pad(next_begins, (0, 1), value=width) - 1

    def gained(values: Tensor) -> Tensor:
        """float64 ``[B, buckets]``."""
        return values.cumsum(dim=-1, dtype=torch.float64).gather(-1, ends).diff(dim=-1, prepend=ratio.tokens.new_zeros(rows, 1))

    return _bucket_columns("turn", gained(ratio.ones), gained(ratio.values), gained(ratio.k3))


def _bucket_columns(name: str, tokens: Tensor, log_ratio: Tensor, k3: Tensor) -> Columns:
    """Columns of every bucket out of sums ``[B, buckets]``."""
    parts = {"tokens": tokens, "log_ratio": log_ratio, "k3": k3}
    return {f"{name}_{n}.{part}": column for part, sums in parts.items() for n, column in enumerate(sums.unbind(dim=1))}


def concatenate(parts: list[Columns]) -> Columns:
    """The columns of all rows, from those of consecutive chunks."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def real_rows(columns: Mapping[str, Tensor]) -> Tensor:
    """bool ``[B]``: rows with at least one valid token."""
    return columns["tokens"] > 0
