"""One pass over the tokens of some rows: what every row adds up to. Everything else is computed from these columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.config.thresholds import Threshold
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.rejection import BoundedRule, row_aggregates

Columns = dict[str, Tensor]
"""Columns of float64 ``[B]`` by name: sums over a row's valid tokens; ``*.max`` are largest values (-inf: no token)."""


@dataclass(frozen=True)
class TokenWeights:
    """Weights of a level at which every token has its own, of some rows."""

    raw: Tensor
    """float64 ``[B, T]``: before the threshold."""
    applied: Tensor
    """float64 ``[B, T]``: after it, before normalisation."""


def deciding_columns(ratio: LogRatio, rules: list[BoundedRule], config: RolloutCorrectionConfig) -> Columns:
    """What decides over whole rows: their weight and whether they are kept."""
    columns = {
        "tokens": ratio.tokens,
        "response_tokens": ratio.response_tokens,
        "log_ratio": ratio.values.sum(dim=-1),
        **row_aggregates(ratio, rules),
    }
    if config.rollout_token_veto_threshold is not None:
        columns["negated_log_ratio.max"] = ratio.row_max(-ratio.values)
        catastrophic = ratio.values < math.log(config.rollout_token_veto_threshold)
        columns["catastrophic"] = catastrophic.sum(dim=-1).double()
    return columns


def describing_columns(ratio: LogRatio, full: bool) -> Columns:
    """What describes the gap between the policies, whatever is done about it."""
    columns = {
        "train": ratio.train.sum(dim=-1),
        "bounded": ratio.bounded.sum(dim=-1),
        "excess": ratio.excess.sum(dim=-1),
        "excess_square": ratio.excess.square().sum(dim=-1),
        "safety_clamped": (ratio.values != ratio.bounded).sum(dim=-1).double(),
    }
    if full:
        magnitude = ratio.values.abs()
        columns |= {
            "ratio_square": torch.where(ratio.valid, ratio.excess + 1.0, 0.0).square().sum(dim=-1),
            "exact": (ratio.valid & (magnitude == 0)).sum(dim=-1).double(),
            "magnitude.max": ratio.row_max(magnitude),
        }
    return columns


def weight_columns(ratio: LogRatio, weights: TokenWeights, threshold: Threshold, full: bool) -> Columns:
    """Sums and extremes of token-level weights; ``excess`` is ``w - 1``."""
    applied = torch.where(ratio.valid, weights.applied, 1.0)
    raw = torch.where(ratio.valid, weights.raw, 1.0)
    excess, raw_excess = applied - 1.0, raw - 1.0
    columns = {
        "weight.excess": excess.sum(dim=-1),
        "weight.excess_square": excess.square().sum(dim=-1),
        "weight.square": torch.where(ratio.valid, applied, 0.0).square().sum(dim=-1),
        "weight.max": ratio.row_max(applied),
        "weight.negated.max": ratio.row_max(-applied),
        "weight.raw_excess": raw_excess.sum(dim=-1),
        "weight.high": (ratio.valid & (raw > threshold.upper)).sum(dim=-1).double(),
        "weight.low": (ratio.valid & (raw < threshold.reciprocal_lower)).sum(dim=-1).double(),
    }
    if full:
        columns |= {
            "weight.raw_excess_square": raw_excess.square().sum(dim=-1),
            "weight.raw_square": torch.where(ratio.valid, raw, 0.0).square().sum(dim=-1),
            "weight.raw.max": ratio.row_max(raw),
            "weight.raw_negated.max": ratio.row_max(-raw),
        }
    return columns


def token_rule_columns(ratio: LogRatio, bounded: BoundedRule) -> Columns:
    """Sums, extremes and counts of the statistic of a token rule; ``clamped`` is counted from the upper bound."""
    statistic, name = ratio.divergence(bounded.rule.divergence), f"rule.{bounded.name}"
    clamped = torch.where(ratio.valid, bounded.clamp(statistic) - bounded.upper, 0.0)
    high, low = bounded.beyond(statistic)
    return {
        f"{name}.total": statistic.sum(dim=-1),
        f"{name}.clamped": clamped.sum(dim=-1),
        f"{name}.clamped_square": clamped.square().sum(dim=-1),
        f"{name}.statistic.max": ratio.row_max(statistic),
        f"{name}.negated.max": ratio.row_max(-statistic),
        f"{name}.high": (ratio.valid & high).sum(dim=-1).double(),
        f"{name}.low": (ratio.valid & low).sum(dim=-1).double(),
    }


def age_columns(ratio: LogRatio, ages: Tensor | None, buckets: int) -> Columns:
    """Tokens, log-ratios and k3 by age (int ``[B, T]``, updates) of the weights that sampled them.

    The last bucket holds all older tokens too; without ``ages`` nothing counts.
    """
    counted = ratio.valid if ages is not None else torch.zeros_like(ratio.valid)
    known = torch.zeros_like(ratio.valid, dtype=torch.int64) if ages is None else ages
    bucketed = torch.where(counted, known.clamp(0, buckets - 1), -1)
    columns = {
        "age": torch.where(counted, known, 0).sum(dim=-1).double(),
        "age.max": ratio.row_max(torch.where(counted, known.double(), -torch.inf)),
    }
    for age in range(buckets):
        here = bucketed == age
        columns[f"age_{age}.tokens"] = here.sum(dim=-1).double()
        columns[f"age_{age}.log_ratio"] = torch.where(here, ratio.values, 0.0).sum(dim=-1)
        columns[f"age_{age}.k3"] = torch.where(here, ratio.k3, 0.0).sum(dim=-1)
    return columns


def concatenate(parts: list[Columns]) -> Columns:
    """The columns of all rows, from those of consecutive chunks."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def real_rows(columns: Mapping[str, Tensor]) -> Tensor:
    """bool ``[B]``: rows with at least one valid token."""
    return columns["tokens"] > 0
