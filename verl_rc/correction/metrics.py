"""Computing metrics from statistics, under verl's names with the definitions of docs/metrics.md."""

import math
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from verl_rc.config.rollout_correction import CorrectionSettings, WeightSettings
from verl_rc.correction.histogram import percentiles
from verl_rc.correction.totals import RuleTotals, Totals, WeightSums
from verl_rc.metrics.log_ratio_bins import BINS_PER_SIDE, bin_value
from verl_rc.metrics.mergeable import Extremes, Moments
from verl_rc.metrics.signatures import signature_metrics
from verl_rc.metrics.splits import PERCENTS
from verl_rc.tensor_ops import LOG_RATIO_BOUND

SMALLEST_NORMALISER = 1e-8
"""Weights are not divided by a mean weight of this or less."""
_LEVELS = ("token", "sequence", "geometric")
"""Levels of weights that are exponentials of log-ratios with a histogram, in the order of the histograms."""
_RULES = ("token_k1", "seq_sum_k1", "seq_mean_k1")
"""Rules on the same log-ratios."""


@dataclass(frozen=True)
class Numbers:
    """All statistics of some sequences, on the host."""

    totals: Totals[float]
    histograms: list[list[float]]
    """Counts of log-ratios: tokens, sums and means of sequences; empty without full diagnostics."""


def correction_metrics(numbers: Numbers, settings: CorrectionSettings) -> dict[str, float]:
    """All ``rollout_corr/*`` metrics of the sequences in ``numbers``; 0 where nothing was measured."""
    totals = numbers.totals
    metrics = {name: mean.value for name, mean in totals.means.items()}
    metrics |= _extremes("log_ppl_diff_", totals.extremes["log_ppl_diff"])
    if settings.weights is not None:
        # Before normalisation: a factor of the whole batch must not hide what the weights themselves do.
        metrics |= _weight_metrics(totals.weights, settings.weights)
        if settings.full:
            metrics |= _full_weight_metrics(numbers, settings.weights)
    for name, rule in totals.rules.items():
        metrics |= _rule_metrics(f"rollout_rs_{name}_", rule)
    has_turns = "turn_1_k3_kl" in totals.splits and totals.splits["turn_1_k3_kl"].count > 0
    metrics |= {
        name: split.value
        for name, split in totals.splits.items()
        if split.count and (has_turns or not name.startswith("turn_"))
    }
    if settings.full:
        metrics |= _percentiles("log_ratio", numbers.histograms[0])
        if totals.ratios is not None and (z := misalignment_z(totals.ratios)) is not None:
            metrics["misalignment_z"] = z
        if totals.signatures is not None:
            metrics |= signature_metrics(totals.signatures, numbers.histograms[0])
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def _extremes(prefix: str, extremes: Extremes[float]) -> dict[str, float]:
    """``<prefix>max`` and ``<prefix>min``; 0 without any value."""
    if extremes.largest == -math.inf:
        return {f"{prefix}max": 0.0, f"{prefix}min": 0.0}
    return {f"{prefix}max": extremes.largest, f"{prefix}min": -extremes.negated_smallest}


def _weight_metrics(weights: Mapping[str, WeightSums[float]], settings: WeightSettings) -> dict[str, float]:
    tokens, sequences = weights["applied_token"], weights["applied_sequence"]
    level = sequences if settings.is_per_row else tokens
    sequence_extremes = _extremes("rollout_is_seq_", sequences.extremes)
    metrics = {
        "rollout_is_mean": tokens.mean,
        "rollout_is_std": tokens.excess.std,
        "rollout_is_eff_sample_size": level.effective_sample_size,
        "rollout_is_seq_mean": sequences.mean,
        "rollout_is_seq_std": sequences.excess.sample_std,
        "rollout_is_seq_max_deviation": max(abs(w - 1.0) for w in sequence_extremes.values())
        if sequences.excess.count
        else 0.0,
        **_extremes("rollout_is_", level.extremes),
        **sequence_extremes,
    }
    if settings.is_per_row:
        metrics |= _extremes("rollout_is_raw_", weights["raw_sequence"].extremes)
    if settings.batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = level.mean if level.mean > SMALLEST_NORMALISER else 1.0
    return metrics


def _full_weight_metrics(numbers: Numbers, settings: WeightSettings) -> dict[str, float]:
    """Raw weights at the estimator's level, effective sample sizes of all levels, percentiles."""
    weights = numbers.totals.weights
    metrics = {f"rollout_is_ess_{name}": sums.effective_sample_size for name, sums in weights.items()}
    raw = weights[f"raw_{'sequence' if settings.is_per_row else 'token'}"]
    metrics |= {"rollout_is_raw_mean": raw.mean, "rollout_is_raw_std": raw.excess.std}
    metrics |= _extremes("rollout_is_raw_", raw.extremes)
    # Raw weights are exponentials of the log-ratios counted; the products of a prefix are counted nowhere.
    counts = dict(zip(_LEVELS, numbers.histograms, strict=True)).get(settings.level, [])
    logs = _percentiles("rollout_is", counts)
    return metrics | {name: math.exp(min(log, LOG_RATIO_BOUND)) for name, log in logs.items()}


def _percentiles(name: str, counts: Sequence[float]) -> dict[str, float]:
    """``<name>_p1`` to ``<name>_p99`` of the log-ratios in a histogram; empty without any."""
    return {f"{name}_p{percent}": log for percent, log in percentiles(counts, PERCENTS).items()}


def _rule_metrics(prefix: str, rule: RuleTotals[float]) -> dict[str, float]:
    sequence_extremes = _extremes(f"{prefix}seq_", rule.sequence_extremes)
    return {
        f"{prefix}std": rule.clamped.std,
        f"{prefix}seq_mean": rule.sequences.value,
        f"{prefix}seq_std": rule.sequences.sample_std,
        f"{prefix}seq_max_deviation": max(abs(value) for value in sequence_extremes.values()),
        **_extremes(prefix, rule.extremes),
        **sequence_extremes,
    }


def misalignment_z(excess: Moments[float]) -> float | None:
    """``mean(rho - 1) / (std(rho) / sqrt(n))``: how many standard errors the mean raw ratio lies from 1.

    Two proper distributions have a mean ratio of 1 however far they lie apart: lasting values far from 0 mean
    sampling filters that the trainer does not mirror, or log-probs of other tokens. 0 when all ratios are
    exactly 1. None where there is no spread to compare with: fewer than two ratios, or all the same but not
    1.
    """
    if excess.count >= 2 and excess.square == 0.0:
        return 0.0
    # Ratios that are all the same leave a variance of rounding errors, not of 0.
    if excess.count < 2 or excess.variance <= 1e-12 * excess.value**2:
        return None
    return excess.value / (excess.std / math.sqrt(excess.count))


def bound_for_acceptance(numbers: Numbers, rule: str, share: float) -> float:
    """The smallest u for which ``rule`` with bounds 1/u to u would have accepted at least ``share`` of the
    tokens or sequences.

    Thresholds set by the acceptance they lead to follow the drift that fixed ones run into. Known to 3.1 % of
    ln u; NaN when nothing was measured. Raises ``ValueError`` for other rules, a share outside (0, 1], and
    without full diagnostics.
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share to accept must be in (0, 1]; got {share}")
    counts = _counts(numbers, rule)
    below, center, above = counts[:BINS_PER_SIDE], counts[BINS_PER_SIDE], counts[BINS_PER_SIDE + 1 :]
    accepted = list(accumulate(map(operator.add, reversed(below), above), initial=center))
    target = share * accepted[-1] * (1 - 1e-12)  # the product may round to above the sum of all
    bound = math.exp(bin_value(BINS_PER_SIDE + bisect_left(accepted, target)))
    return bound if any(counts) else math.nan


def _counts(numbers: Numbers, rule: str) -> list[float]:
    if rule not in _RULES:
        raise ValueError(f"histograms answer for {', '.join(_RULES)}; got {rule!r}")
    if not numbers.histograms:
        raise ValueError(
            "histograms are measured with algorithm.rollout_correction.diagnostics=full only; it was core"
        )
    return numbers.histograms[_RULES.index(rule)]
