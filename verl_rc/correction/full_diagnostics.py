"""The metrics of ``diagnostics: full``: percentiles, effective sample sizes of every level, staleness, who is rejected."""

import math

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.correction.accounting import LENGTH_EDGES
from verl_rc.correction.context import NUM_AGES, NUM_TURNS
from verl_rc.correction.histogram import percentiles
from verl_rc.correction.log_ratio import SAFETY_BOUND
from verl_rc.correction.moments import Moments, Numbers, effective_sample_size
from verl_rc.correction.tail import pareto_k

PERCENTS = (1, 5, 25, 50, 75, 95, 99)


def full_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    """What full diagnostics add, without the prefix. Splits of which nothing was seen are left out."""
    metrics = _gap_metrics(numbers, config)
    if config.rollout_is is not None:
        metrics |= _weight_metrics(numbers, config)
    if config.rejects:
        metrics |= _rejection_metrics(numbers)
    return metrics | _kept_metrics(numbers) | _age_metrics(numbers) | _turn_metrics(numbers)


def _gap_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Percentiles of log-ratios of tokens, rows (``seq``) and row means (``geo``); exactness; the test for misalignment."""
    metrics = {
        f"log_ratio{level}_p{percent}": value
        for level, counts in zip(("", "_seq", "_geo"), numbers.histograms, strict=True)
        if any(counts)
        for percent, value in percentiles(counts, PERCENTS).items()
    }
    metrics["log_ratio_abs_max"] = max(numbers.maxima["log_ratio_abs"], 0.0)
    metrics["log_ratio_exact_fraction"] = numbers.share("exact_tokens", "tokens")
    metrics["safety_clamped_seq_fraction"] = numbers.share("safety_clamped_rows", "rows")
    if not config.bypass_mode:
        tokens = Moments(numbers.sums["ratio_excess"], numbers.sums["ratio_excess_square"], numbers.sums["tokens"])
        rows = Moments(numbers.sums["sequence_excess"], numbers.sums["sequence_excess_square"], numbers.sums["rows"])
        metrics |= {"misalignment_z": misalignment_z(tokens), "misalignment_z_seq": misalignment_z(rows)}
    return metrics


def misalignment_z(excess: Moments) -> float:
    """``mean(rho - 1) / (std(rho) / sqrt(n))``: how many standard errors the mean raw ratio lies from 1.

    Under the rollout policy ratios have mean 1 whatever the gap, as long as both sides mean the same tokens, temperature and
    support; lasting values far beyond 3 point to a bug there, not to off-policy data. 0 when all ratios are equal to 1.
    """
    if not excess.count or excess.mean == 0.0:
        return 0.0
    error = excess.std / math.sqrt(excess.count)
    return excess.mean / error if error > 0 else math.copysign(math.inf, excess.mean)


def _weight_metrics(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Raw and applied weights apart, at the estimator's level; their percentiles; effective sample sizes of every level."""
    sums = numbers.sums
    level = ("is_row", "raw_row", "rows") if config.weight_is_per_row else ("is", "raw", "tokens")
    metrics: dict[str, float] = {}
    for kind, name in zip(("applied", "raw"), level[:2], strict=True):
        moments = numbers.moments(name, sums[level[2]])
        metrics[f"rollout_is_{kind}_mean"] = 1.0 + moments.mean if moments.count else 0.0
        metrics[f"rollout_is_{kind}_std"] = moments.std
    if config.weight_is_per_row:
        metrics |= numbers.extremes("rollout_is_applied_", "is_row") | numbers.extremes("rollout_is_raw_", "is")
    else:
        metrics |= numbers.extremes("rollout_is_applied_", "is") | numbers.extremes("rollout_is_raw_", "raw")
    for kind, name in (("applied", "is"), ("raw", "raw")):
        metrics |= {
            f"rollout_is_ess_{kind}_token": _ess(numbers, name, sums["tokens"]),
            f"rollout_is_ess_{kind}_sequence": _ess(numbers, f"{name}_row", sums["rows"]),
        }
        if prompts := sums["prompt.count"]:
            ess = effective_sample_size(sums[f"prompt.{name}"], sums[f"prompt.{name}_square"], prompts)
            metrics[f"rollout_is_ess_{kind}_prompt"] = ess
    return metrics | _weight_percentiles(numbers, config)


def _ess(numbers: Numbers, name: str, count: float) -> float:
    return effective_sample_size(count + numbers.sums[f"{name}.sum"], numbers.sums[f"{name}.w_square"], count)


def _weight_percentiles(numbers: Numbers, config: RolloutCorrectionConfig) -> dict[str, float]:
    """Percentiles and tail of the raw weights, from the log-ratios they are made of; prefix weights have none."""
    levels = {"token": 0, "sequence": 1, "geometric": 2}
    if config.rollout_is is None or config.rollout_is not in levels:
        return {}
    counts = numbers.histograms[levels[config.rollout_is]]
    if not any(counts):
        return {}
    logs = percentiles(counts, PERCENTS)
    metrics = {f"rollout_is_p{percent}": math.exp(min(log, SAFETY_BOUND)) for percent, log in logs.items()}
    shape = pareto_k(counts)
    return metrics if shape is None else {**metrics, "rollout_is_pareto_k": shape}


def _rejection_metrics(numbers: Numbers) -> dict[str, float]:
    """Share of response tokens that one cause alone rejects, and that several reject together."""
    response = numbers.sums["response_tokens"]
    alone = {name: total for name, total in numbers.sums.items() if name.startswith("only.")}
    if not response:
        return {}
    metrics = {f"rollout_rs_{name.removeprefix('only.')}_exclusive_fraction": n / response for name, n in alone.items()}
    several = response - numbers.sums["kept_tokens"] - math.fsum(alone.values())
    return {**metrics, "rollout_rs_overlap_fraction": max(several, 0.0) / response}


def _kept_metrics(numbers: Numbers) -> dict[str, float]:
    """Share of tokens kept by length of the response, sign of the advantage and correctness; scores of kept rows."""
    sums = numbers.sums
    names = [f"length_{index}" for index in range(len(LENGTH_EDGES) + 1)]
    labels = [*(f"length_le_{edge}" for edge in LENGTH_EDGES), f"length_gt_{LENGTH_EDGES[-1]}"]
    groups = {
        **dict(zip(names, labels, strict=True)),
        "positive": "positive_advantage",
        "negative": "negative_advantage",
        "correct": "correct",
        "wrong": "wrong",
    }
    metrics = {
        f"kept_fraction_{label}": sums[f"{name}.kept"] / sums[f"{name}.tokens"]
        for name, label in groups.items()
        if sums[f"{name}.tokens"]
    }
    for name in ("kept", "rejected"):
        if rows := sums[f"score_{name}.rows"]:
            metrics[f"{name}_score_mean"] = sums[f"score_{name}.sum"] / rows
    return metrics


def _age_metrics(numbers: Numbers) -> dict[str, float]:
    """Age of the tokens in updates, and the gap by age; the last bucket holds all older ones too."""
    if numbers.maxima["age"] == -math.inf:
        return {}
    metrics = {"token_age_mean": numbers.share("age", "tokens"), "token_age_max": numbers.maxima["age"]}
    return metrics | _bucket_metrics(numbers, "age", NUM_AGES)


def _turn_metrics(numbers: Numbers) -> dict[str, float]:
    """The gap by turn of the conversation, where any has a second one; the last bucket holds all later turns too."""
    return _bucket_metrics(numbers, "turn", NUM_TURNS) if numbers.sums["turn_1.tokens"] else {}


def _bucket_metrics(numbers: Numbers, name: str, buckets: int) -> dict[str, float]:
    """Share of the tokens and gap of every bucket of ``name`` that has a token."""
    sums = numbers.sums
    metrics: dict[str, float] = {}
    for bucket in range(buckets):
        if tokens := sums[f"{name}_{bucket}.tokens"]:
            metrics |= {
                f"{name}_{bucket}_token_fraction": tokens / sums["tokens"],
                f"{name}_{bucket}_kl": -sums[f"{name}_{bucket}.log_ratio"] / tokens,
                f"{name}_{bucket}_k3_kl": sums[f"{name}_{bucket}.k3"] / tokens,
            }
    return metrics
