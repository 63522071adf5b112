"""Sums and extremes of the weights of all rows, at token, row and prompt level."""

import torch
from torch import Tensor

from verl_rc.correction.importance import bounded_exp, bounded_weights, row_weights
from verl_rc.correction.resolved import ResolvedCorrection
from verl_rc.correction.rows import Columns, real_rows


def row_level_weights(columns: Columns, resolved: ResolvedCorrection) -> tuple[Tensor, Tensor]:
    """Raw and applied weight ``[B]`` of every row: the one its tokens share, or the mean over its tokens; 1 for empty rows."""
    config, tokens = resolved.config, columns["tokens"]
    if resolved.has_token_weights:
        counts = tokens.clamp_min(1.0)
        return 1.0 + columns["weight.raw_excess"] / counts, 1.0 + columns["weight.excess"] / counts
    assert config.rollout_is is not None
    assert resolved.threshold is not None
    raw = row_weights(columns["log_ratio"], tokens, config.rollout_is)
    return raw, bounded_weights(raw, resolved.threshold)


def weight_sums(columns: Columns, resolved: ResolvedCorrection) -> Columns:
    """Every row's share in the sums: ``.sum`` and ``.square`` of w - 1, exact near 1, ``.w_square`` of w, exact near 0."""
    threshold, tokens, real = resolved.threshold, columns["tokens"], real_rows(columns)
    assert threshold is not None
    raw, applied = row_level_weights(columns, resolved)
    high, low = real & (raw > threshold.upper), real & (raw < threshold.reciprocal_lower)
    sums = _row_moments("is_row", applied, real)
    sums |= {"is_row_high": high.double(), "is_row_low": low.double()}
    if resolved.has_token_weights:
        sums |= {
            "is.sum": columns["weight.excess"],
            "is.square": columns["weight.excess_square"],
            "is.w_square": columns["weight.square"],
            "is_high": columns["weight.high"],
            "is_low": columns["weight.low"],
            "is_out_of_band": columns["weight.high"] + columns["weight.low"],
        }
    else:
        sums |= _token_moments("is", applied, tokens)
        sums |= {"is_high": high.double(), "is_low": low.double(), "is_out_of_band": tokens * (high | low)}
    if resolved.full:
        sums |= _row_moments("raw_row", raw, real)
        sums |= _raw_token_moments(columns) if resolved.has_token_weights else _token_moments("raw", raw, tokens)
    return sums


def weight_maxima(columns: Columns, resolved: ResolvedCorrection) -> Columns:
    """Every row's extremes; where a row has one weight, ``is`` holds the raw ones (verl's definition)."""
    real = real_rows(columns)
    raw, applied = row_level_weights(columns, resolved)
    maxima = _extremes("is_row", applied, real)
    if not resolved.has_token_weights:
        return maxima | _extremes("is", raw, real)
    largest, smallest = bounded_exp(columns["weight.log.max"]), bounded_exp(-columns["weight.negated_log.max"])
    if resolved.full:
        maxima |= {**_largest("raw.max", largest, real), **_largest("raw.negated_min", -smallest, real)}
    threshold = resolved.threshold
    assert threshold is not None
    if threshold.lower is not None:
        return maxima | {"is.max": columns["weight.max"], "is.negated_min": columns["weight.negated.max"]}
    largest, smallest = (bounded_weights(weights, threshold) for weights in (largest, smallest))
    return maxima | _largest("is.max", largest, real) | _largest("is.negated_min", -smallest, real)


def prompt_columns(columns: Columns, resolved: ResolvedCorrection, group_slots: Tensor | None) -> Columns:
    """Sums over prompts of ``W_p``, the mean weight of a prompt's rows, and its square, raw and applied; 0 without groups."""
    real = real_rows(columns).double()
    if group_slots is None:
        return {f"prompt.{part}": torch.zeros_like(real) for part in ("count", "raw", "raw_square", "is", "is_square")}
    rows = torch.zeros_like(real).index_add_(0, group_slots, real)
    sums = {"prompt.count": (rows > 0).double()}
    for name, weights in zip(("raw", "is"), row_level_weights(columns, resolved), strict=True):
        mean = torch.zeros_like(real).index_add_(0, group_slots, weights * real) / rows.clamp_min(1.0)
        sums |= {f"prompt.{name}": mean, f"prompt.{name}_square": mean.square()}
    return sums


def _token_moments(name: str, weights: Tensor, tokens: Tensor) -> Columns:
    excess = weights - 1.0
    return {
        f"{name}.sum": tokens * excess,
        f"{name}.square": tokens * excess.square(),
        f"{name}.w_square": tokens * weights.square(),
    }


def _raw_token_moments(columns: Columns) -> Columns:
    return {
        "raw.sum": columns["weight.raw_excess"],
        "raw.square": columns["weight.raw_excess_square"],
        "raw.w_square": columns["weight.raw_square"],
    }


def _row_moments(name: str, weights: Tensor, real: Tensor) -> Columns:
    return _token_moments(name, weights, real.double())


def _extremes(name: str, column: Tensor, where: Tensor) -> Columns:
    return _largest(f"{name}.max", column, where) | _largest(f"{name}.negated_min", -column, where)


def _largest(name: str, column: Tensor, where: Tensor) -> Columns:
    return {name: column.masked_fill(~where, -torch.inf)}
