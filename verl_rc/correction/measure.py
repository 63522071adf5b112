"""MEASURE: everything the metrics, and the application of weights, need to know about some rows."""

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.importance import applied_weights, raw_weights
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, log_ratio
from verl_rc.correction.rejection import RuleStatistic, kept_by, rule_statistics
from verl_rc.correction.statistics import CorrectionStatistics, StatisticsBuilder


def measure(
    train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> CorrectionStatistics:
    """Mergeable statistics of ``[B, T]`` log-probs (nats); ``train`` is the proximal policy (decoupled) or the
    current one (bypass).

    All of them are taken before rejection. Rows without response tokens never count.
    """
    ratio = log_ratio(train_log_probs, rollout_log_probs, response_mask, config)
    builder = StatisticsBuilder()
    row_is_real = ratio.row_counts > 0
    builder.count("tokens", ratio.valid)
    builder.count("response_tokens", ratio.response_mask)
    builder.count("rows", row_is_real)
    _measure_gap(builder, train_log_probs, rollout_log_probs, ratio)
    if config.rollout_is is not None:
        _measure_weights(builder, ratio, config)
    if config.rollout_rs is not None:
        _measure_rejection(builder, ratio, config)
    return builder.build()


def _measure_gap(builder: StatisticsBuilder, train_log_probs: Tensor, rollout_log_probs: Tensor, ratio: LogRatio) -> None:
    rows = ratio.row_counts > 0
    train = ratio.row_means(train_log_probs.detach())
    rollout = ratio.row_means(rollout_log_probs.detach())
    difference = rollout - train
    columns = {
        "training_ppl": (-train).exp(),
        "training_log_ppl": -train,
        "rollout_ppl": (-rollout).exp(),
        "rollout_log_ppl": -rollout,
        "log_ppl_diff": difference,
        "log_ppl_abs_diff": difference.abs(),
        "ppl_ratio": difference.exp(),
        "chi2_seq": torch.expm1(2 * ratio.row_sums.clamp(-SAFETY_BOUND, SAFETY_BOUND).double()),
    }
    for name, column in columns.items():
        builder.total(name, column, rows)
    builder.extremes("log_ppl_diff", difference, rows)
    builder.total("kl", -ratio.values, ratio.valid)
    builder.total("k3_kl", torch.expm1(ratio.bounded) - ratio.bounded, ratio.valid)
    builder.total("chi2_token", torch.expm1(2 * ratio.bounded.double()), ratio.valid)
    builder.count("nonfinite_tokens", ratio.response_mask & ~ratio.valid)
    builder.count("safety_clamped_tokens", ratio.valid & (ratio.values.abs() > SAFETY_BOUND))


def _measure_weights(builder: StatisticsBuilder, ratio: LogRatio, config: RolloutCorrectionConfig) -> None:
    assert config.rollout_is is not None
    threshold = config.weight_threshold()
    lower, upper = threshold.reciprocal_lower, threshold.upper
    raw, applied = raw_weights(ratio, config.rollout_is), applied_weights(ratio, config)
    rows = ratio.row_counts > 0
    row_raw, row_applied = ratio.row_means(raw), ratio.row_means(applied)
    by_token = config.rollout_is == "token"
    builder.moments("is", applied, ratio.valid, centre=1.0)
    builder.moments("is_row", row_applied, rows, centre=1.0)
    builder.extremes("is", applied if by_token else row_raw, ratio.valid if by_token else rows)
    builder.extremes("is_row", row_applied, rows)
    level, seen = (raw, ratio.valid) if by_token else (row_raw, rows)
    builder.count("is_high", seen & (level > upper))
    builder.count("is_low", seen & (level < lower))
    builder.count("is_row_high", rows & (row_raw > upper))
    builder.count("is_row_low", rows & (row_raw < lower))
    builder.count("is_out_of_band", ratio.valid & ((raw > upper) | (raw < lower)))


def _measure_rejection(builder: StatisticsBuilder, ratio: LogRatio, config: RolloutCorrectionConfig) -> None:
    rows = ratio.row_counts > 0
    keep = ~ratio.rejected
    for statistic in rule_statistics(ratio, config):
        kept = kept_by(statistic, ratio)
        keep = keep & kept
        _measure_rule(builder, statistic, ratio, kept)
    rejected = ratio.response_mask & ~keep
    builder.count("rs_rejected_tokens", rejected)
    builder.count("rs_touched_rows", rows & rejected.any(dim=-1))


def _measure_rule(builder: StatisticsBuilder, statistic: RuleStatistic, ratio: LogRatio, kept: Tensor) -> None:
    rows, name = ratio.row_counts > 0, f"rs.{statistic.name}"
    tokens = statistic.values.expand_as(ratio.values)
    row_values = ratio.row_means(tokens) if statistic.is_token_rule else statistic.values[:, 0]
    bounded = tokens.clamp(max=statistic.log_upper)
    if statistic.log_lower is not None:
        bounded = bounded.clamp(min=statistic.log_lower)
    builder.total(f"{name}.token_total", tokens, ratio.valid)
    builder.moments(f"{name}.bounded", bounded, ratio.valid)
    builder.moments(f"{name}.row", row_values, rows)
    level, seen = (tokens, ratio.valid) if statistic.is_token_rule else (row_values, rows)
    builder.extremes(name, level, seen)
    builder.extremes(f"{name}.row", row_values, rows)
    beyond_upper, beyond_lower = _beyond(statistic, level)
    row_beyond_upper, row_beyond_lower = _beyond(statistic, row_values)
    builder.count(f"{name}.high", seen & beyond_upper)
    builder.count(f"{name}.low", seen & beyond_lower)
    builder.count(f"{name}.row_high", rows & row_beyond_upper)
    builder.count(f"{name}.row_low", rows & row_beyond_lower)
    rejected = ratio.valid & ~kept
    builder.count(f"{name}.rejected_tokens", rejected)
    builder.count(f"{name}.touched_rows", rows & rejected.any(dim=-1))


def _beyond(statistic: RuleStatistic, values: Tensor) -> tuple[Tensor, Tensor]:
    """Where the upper, and where the lower bound *of the ratio* is broken; k1 statistics run against their ratio."""
    above = values > statistic.log_upper
    if statistic.log_lower is None:
        return above, torch.zeros_like(above)
    return values < statistic.log_lower, above
