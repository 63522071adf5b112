"""From statistics to metrics, under verl's names with the definitions of docs/metrics.md."""

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.full_diagnostics import full_metrics
from verl_rc.correction.moments import Moments, Numbers, effective_sample_size

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

SMALLEST_NORMALISER = 1e-8
"""Mean weights up to this are not divided by."""


def correction_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    """All ``rollout_corr/*`` metrics of the rows behind ``numbers``. What was not there to be measured counts as 0."""
    metrics = {name: numbers.share(name, "rows") for name in _ROW_MEANS}
    metrics |= {name: numbers.share(name, "tokens") for name in _TOKEN_MEANS}
    metrics |= numbers.extremes("log_ppl_diff_", "log_ppl_diff")
    metrics["nonfinite_token_fraction"] = numbers.share("nonfinite_tokens", "response_tokens")
    metrics["safety_clamped_fraction"] = numbers.share("safety_clamped_tokens", "tokens")
    if config.rollout_is is not None:
        metrics |= _weight_metrics(numbers, config)
    if config.rejects:
        metrics |= _rejection_metrics(numbers, config)
    if config.diagnostics == "full":
        metrics |= full_metrics(numbers, config)
    return {_PREFIX + name: value for name, value in metrics.items()}


def _weight_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    sums = numbers.sums
    tokens, rows = sums["tokens"], sums["rows"]
    level, count, count_name = ("is_row", rows, "rows") if config.weight_is_per_row else ("is", tokens, "tokens")
    token, row = numbers.moments("is", tokens), numbers.moments("is_row", rows)
    metrics = {
        "rollout_is_mean": 1.0 + token.mean if tokens else 0.0,
        "rollout_is_std": token.std,
        "rollout_is_eff_sample_size": effective_sample_size(count + sums[f"{level}.sum"], sums[f"{level}.w_square"], count),
        "rollout_is_ratio_fraction_high": numbers.share("is_high", count_name),
        "rollout_is_ratio_fraction_low": numbers.share("is_low", count_name),
        "rollout_is_seq_mean": 1.0 + row.mean if rows else 0.0,
        "rollout_is_seq_std": row.sample_std,
        "rollout_is_seq_fraction_high": numbers.share("is_row_high", "rows"),
        "rollout_is_seq_fraction_low": numbers.share("is_row_low", "rows"),
        **numbers.extremes("rollout_is_", "is"),
        **numbers.extremes("rollout_is_seq_", "is_row"),
    }
    largest, smallest = metrics["rollout_is_seq_max"], metrics["rollout_is_seq_min"]
    metrics["rollout_is_seq_max_deviation"] = max(abs(largest - 1.0), abs(smallest - 1.0)) if rows else 0.0
    if config.weight_threshold().lower is not None:
        metrics["rollout_is_oob_ratio"] = numbers.share("is_out_of_band", "tokens")
    if config.rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = normaliser(numbers, config)
    return metrics


def normaliser(numbers: Numbers, config: RolloutCorrectionConfig) -> float:
    """What batch normalisation divides by: the mean weight, or 1 where that is 0."""
    name, count = ("is_row", "rows") if config.weight_is_per_row else ("is", "tokens")
    mean = 1.0 + numbers.moments(name, numbers.sums[count]).mean
    return mean if mean > SMALLEST_NORMALISER else 1.0


def _rejection_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    response = numbers.sums["response_tokens"]
    metrics = {
        "rollout_rs_masked_fraction": (response - numbers.sums["kept_tokens"]) / response if response else 0.0,
        "rollout_rs_seq_masked_fraction": numbers.share("touched_rows", "response_rows"),
        "rollout_rs_seq_rejected_fraction": numbers.share("rejected_rows", "response_rows"),
    }
    if config.rollout_token_veto_threshold is not None:
        metrics["rollout_is_veto_fraction"] = numbers.share("vetoed_rows", "rows")
        metrics["rollout_is_catastrophic_token_fraction"] = numbers.share("catastrophic_tokens", "tokens")
    if config.rollout_opsm_threshold is not None:
        metrics["rollout_rs_opsm_masked_fraction"] = numbers.share("opsm_tokens", "response_tokens")
        metrics["rollout_rs_opsm_seq_masked_fraction"] = numbers.share("opsm_rows", "response_rows")
    for rule in config.rejection_rules():
        values = _rule_metrics(numbers, f"rs.{rule.name}", per_token=rule.is_per_token)
        if rule.bounds_ratio:
            values["seq_fraction_low"] = numbers.share(f"rs.{rule.name}.row_low", "rows")
        metrics |= {f"rollout_rs_{rule.name}_{name}": value for name, value in values.items()}
    return metrics


def _rule_metrics(numbers: Numbers, name: str, *, per_token: bool) -> dict[str, float]:
    sums = numbers.sums
    tokens, rows = sums["tokens"], sums["rows"]
    clamped = Moments(sums[f"{name}.clamped"], sums[f"{name}.clamped_square"], tokens)
    row, row_range = numbers.moments(f"{name}.row", rows), numbers.extremes("seq_", f"{name}.row")
    level = "tokens" if per_token else "rows"
    return {
        "mean": numbers.share(f"{name}.total", "tokens"),
        "std": clamped.std,
        "fraction_high": numbers.share(f"{name}.high", level),
        "fraction_low": numbers.share(f"{name}.low", level),
        "seq_mean": row.mean,
        "seq_std": row.sample_std,
        "seq_max_deviation": max(abs(value) for value in row_range.values()),
        "seq_fraction_high": numbers.share(f"{name}.row_high", "rows"),
        "masked_fraction": numbers.share(f"{name}.rejected_tokens", "tokens"),
        "seq_masked_fraction": numbers.share(f"{name}.touched_rows", "rows"),
        **numbers.extremes("", name),
        **row_range,
    }
