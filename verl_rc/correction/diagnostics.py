"""From statistics to metrics, under verl's names with the definitions of docs/metrics.md."""

import math

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.statistics import CorrectionStatistics

_PREFIX = "rollout_corr/"
_ROW_MEANS = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_seq",
)
_TOKEN_MEANS = ("kl", "k3_kl", "chi2_token")

Numbers = dict[str, float]


def correction_metrics(statistics: CorrectionStatistics, config: RolloutCorrectionConfig) -> Numbers:
    """All ``rollout_corr/*`` metrics of the rows behind ``statistics``; one copy from the device."""
    sums, maxima = statistics.numbers()
    tokens, rows = max(sums["tokens"], 1.0), max(sums["rows"], 1.0)
    metrics = {name: sums[name] / rows for name in _ROW_MEANS} | {name: sums[name] / tokens for name in _TOKEN_MEANS}
    metrics |= _range("log_ppl_diff_", maxima, "log_ppl_diff")
    metrics["nonfinite_token_fraction"] = sums["nonfinite_tokens"] / max(sums["response_tokens"], 1.0)
    metrics["safety_clamped_fraction"] = sums["safety_clamped_tokens"] / tokens
    if config.rollout_is is not None:
        metrics |= _weight_metrics(sums, maxima, config)
    if config.rollout_rs is not None:
        metrics["rollout_rs_masked_fraction"] = sums["rs_rejected_tokens"] / max(sums["response_tokens"], 1.0)
        metrics["rollout_rs_seq_masked_fraction"] = sums["rs_touched_rows"] / rows
        for rule in config.rejection_bounds():
            metrics |= _rule_metrics(rule, sums, maxima)
    return {_PREFIX + name: value for name, value in metrics.items()}


def _weight_metrics(sums: Numbers, maxima: Numbers, config: RolloutCorrectionConfig) -> Numbers:
    tokens, rows = max(sums["tokens"], 1.0), max(sums["rows"], 1.0)
    by_token = config.rollout_is == "token"
    count = tokens if by_token else rows
    deviation = _Moments(sums, "is", tokens)
    row_deviation = _Moments(sums, "is_row", rows)
    metrics = {
        "rollout_is_mean": 1.0 + deviation.mean if sums["tokens"] else 0.0,
        "rollout_is_std": math.sqrt(deviation.variance),
        "rollout_is_eff_sample_size": effective_sample_size(deviation if by_token else row_deviation, count),
        "rollout_is_ratio_fraction_high": sums["is_high"] / count,
        "rollout_is_ratio_fraction_low": sums["is_low"] / count,
        "rollout_is_seq_mean": 1.0 + row_deviation.mean if sums["rows"] else 0.0,
        "rollout_is_seq_std": math.sqrt(row_deviation.variance * rows / (rows - 1)) if rows > 1 else 0.0,
        "rollout_is_seq_fraction_high": sums["is_row_high"] / rows,
        "rollout_is_seq_fraction_low": sums["is_row_low"] / rows,
        **_range("rollout_is_", maxima, "is"),
        **_range("rollout_is_seq_", maxima, "is_row"),
    }
    largest, smallest = metrics["rollout_is_seq_max"], metrics["rollout_is_seq_min"]
    metrics["rollout_is_seq_max_deviation"] = max(abs(largest - 1.0), abs(smallest - 1.0)) if sums["rows"] else 0.0
    if config.weight_threshold().lower is not None:
        metrics["rollout_is_oob_ratio"] = sums["is_out_of_band"] / tokens
    if config.rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = 1.0 + (deviation if by_token else row_deviation).mean
    return metrics


def _rule_metrics(rule: str, sums: Numbers, maxima: Numbers) -> Numbers:
    tokens, rows = max(sums["tokens"], 1.0), max(sums["rows"], 1.0)
    name = f"rs.{rule}"
    count = tokens if rule.startswith("token_") else rows
    row = _Moments(sums, f"{name}.row", rows)
    extremes = _range("", maxima, f"{name}.row")
    metrics = {
        "mean": sums[f"{name}.token_total"] / tokens,
        "std": math.sqrt(_Moments(sums, f"{name}.bounded", tokens).variance),
        "fraction_high": sums[f"{name}.high"] / count,
        "fraction_low": sums[f"{name}.low"] / count,
        "seq_mean": row.mean,
        "seq_std": math.sqrt(row.variance * rows / (rows - 1)) if rows > 1 else 0.0,
        "seq_max_deviation": max(abs(extremes["max"]), abs(extremes["min"])),
        "seq_fraction_high": sums[f"{name}.row_high"] / rows,
        "masked_fraction": sums[f"{name}.rejected_tokens"] / tokens,
        "seq_masked_fraction": sums[f"{name}.touched_rows"] / rows,
        **_range("", maxima, name),
        **_range("seq_", maxima, f"{name}.row"),
    }
    if rule.endswith("k1"):
        metrics["seq_fraction_low"] = sums[f"{name}.row_low"] / rows
    return {f"rollout_rs_{rule}_{key}": value for key, value in metrics.items()}


class _Moments:
    """Mean and population variance of a column from its centred sums."""

    def __init__(self, sums: Numbers, name: str, count: float) -> None:
        self.mean = sums[f"{name}.sum"] / count
        self.square = sums[f"{name}.square"] / count
        self.variance = max(self.square - self.mean**2, 0.0)


def effective_sample_size(deviation: _Moments, count: float) -> float:
    """``(sum w)^2 / (n sum w^2)`` in [0, 1] from the moments of ``w - 1`` (Kong 1992); 0 when all weights are 0."""
    mean = 1.0 + deviation.mean
    mean_square = 1.0 + 2.0 * deviation.mean + deviation.square
    if not mean_square > 0 or not count:
        return 0.0
    return min(mean**2 / mean_square, 1.0)


def _range(prefix: str, maxima: Numbers, name: str) -> Numbers:
    """Largest and smallest value; 0 where there was nothing."""
    largest, smallest = maxima[f"{name}.max"], -maxima[f"{name}.negated_min"]
    return {
        f"{prefix}max": largest if math.isfinite(largest) else 0.0,
        f"{prefix}min": smallest if math.isfinite(smallest) else 0.0,
    }
