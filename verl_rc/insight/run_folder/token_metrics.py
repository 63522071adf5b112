"""Metrics of a step that its token records tell: of trainers that log none."""

import numpy as np

from verl_rc.insight.run_folder.shared_prefixes import prefix_metrics
from verl_rc.insight.run_folder.signature_sums import (
    ComparedTokens,
    log_ratio_counts,
    noise_interval,
    signature_sums,
)
from verl_rc.metrics.bounds import LOG_RATIO_BOUND
from verl_rc.metrics.signatures import signature_metrics
from verl_rc.records.token_records.token_record import Array, TokenRecord


def metrics_of(record: TokenRecord) -> dict[str, float]:
    """Means over the sampled tokens of random rows, and their signatures, by the catalogue's names."""
    random_rows = record.rows["chosen_by"] == "random"
    counted = record.tokens["response_mask"] & random_rows[record.row_numbers]
    if not counted.any():
        return {}
    metrics = {
        "ledger/sampled_tokens": float(counted.sum()),
        "response_length/mean": float(record.lengths[random_rows].mean()),
    }
    if "score" in record.rows:
        metrics["critic/score/mean"] = float(np.mean(record.rows["score"][random_rows], dtype="float64"))
    if "entropy" in record.tokens:
        finite = record.tokens["entropy"][counted & np.isfinite(record.tokens["entropy"])]
        metrics |= {"actor/entropy": float(np.mean(finite, dtype="float64"))} if len(finite) else {}
    tokens = ComparedTokens.from_record(record)
    if tokens is None:
        return metrics
    log_ratios = tokens.log_ratios[tokens.is_compared]
    clamped = np.clip(log_ratios, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    excess = np.expm1(clamped)
    signatures = signature_metrics(signature_sums(tokens), log_ratio_counts(tokens))
    signatures |= noise_interval(tokens) | prefix_metrics(tokens) | _age_metrics(tokens, excess - clamped)
    return metrics | {
        "rollout_corr/nonfinite_token_fraction": 1.0 - len(log_ratios) / float(counted.sum()),
        "rollout_corr/safety_clamped_fraction": float((log_ratios != clamped).mean()),
        "rollout_corr/kl": float(-clamped.mean()),
        "rollout_corr/k3_kl": float((excess - clamped).mean()),
        "rollout_corr/chi2_token": float((excess * (excess + 2.0)).mean()),
        "sync/rollout_gap_mean": float(np.abs(log_ratios).mean()),
        "sync/rollout_gap_max": float(np.abs(log_ratios).max()),
        **{f"rollout_corr/{name}": value for name, value in signatures.items()},
    }


def _age_metrics(tokens: ComparedTokens, k3: Array) -> dict[str, float]:
    """The gap by age. ``k3``: of the compared tokens."""
    ages_of_all = tokens.record.ages()
    if ages_of_all is None:
        return {}
    ages = ages_of_all[tokens.is_compared]
    gaps = {int(age): float(k3[ages == age].mean()) for age in np.unique(ages)}
    return {f"age_{age}_k3_kl": gap for age, gap in gaps.items()} | {"token_age_mean": float(ages.mean())}
