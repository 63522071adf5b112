"""Series that the rules of the gap look at, computed from the metrics of a run."""

import math
from collections.abc import Sequence

from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import mapped

K1, K3, CHI2 = "rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/chi2_token"
GAP = "sync/rollout_gap_mean"
SUPPORTS = "support/unrecorded_ratio"
"""The metric of runs whose trainer scores tokens over the supports of the engine's filter."""


def token_count(run: RunData) -> Series:
    """Response tokens of each step."""
    if run.has("ledger/sampled_tokens"):
        return run.get("ledger/sampled_tokens")
    totals, responses, prompts = (
        run.get(name).by_step()
        for name in ("perf/total_num_tokens", "response_length/mean", "prompt_length/mean")
    )
    return Series.from_steps(
        {
            step: total * responses[step] / (responses[step] + prompts[step])
            for step, total in totals.items()
            if responses.get(step, 0.0) > 0 and step in prompts
        }
    )


def missing_mass(run: RunData) -> Series:
    """Return by step k1 - k3, which is 1 less the mean ratio: 0 in expectation if the tokens come from what
    was reported."""
    k1, k3 = run.get(K1).by_step(), run.get(K3).by_step()
    return Series.from_steps({step: value - k3[step] for step, value in k1.items() if step in k3})


def z_of_mean_ratio(run: RunData) -> Series:
    """Return by step the mean ratio less 1, in standard errors; from the moments where the run does not
    report it.

    It is negative where mass is missing, as ``misalignment_z``. Over tokens: with every context given, ratios
    less 1 are uncorrelated when the tokens come from what was reported.
    """
    if run.has("rollout_corr/misalignment_z"):
        return run.get("rollout_corr/misalignment_z")
    k1, k3, chi2, counts = (
        series.by_step() for series in (run.get(K1), run.get(K3), run.get(CHI2), token_count(run))
    )
    values = {}
    for step in sorted(k1.keys() & k3.keys() & chi2.keys() & counts.keys()):
        mean_ratio = 1 - k1[step] + k3[step]
        variance = chi2[step] + 1 - mean_ratio**2
        if variance > 0 and counts[step] > 1:
            values[step] = (mean_ratio - 1) / math.sqrt(variance / counts[step])
    return Series.from_steps(values)


def gap_size(run: RunData) -> Series:
    """sqrt(k3) by step, or the mean |log-ratio| where k3 was not logged; nats per token."""
    return mapped(run.get(K3), nats_of_k3) if run.has(K3) else run.get(GAP)


def nats_of_k3(k3: float) -> float:
    """The gap that a k3 belongs to; rounding may leave a k3 of 0 below it."""
    return math.sqrt(max(k3, 0.0))


def gaps_by_age(run: RunData) -> dict[int, Series]:
    """The gap of the tokens of each age, sqrt(k3) by step, youngest first."""
    gaps = {}
    for name, series in run.matching("rollout_corr/age_", "_k3_kl"):
        age = name.removeprefix("rollout_corr/age_").removesuffix("_k3_kl")
        if age.isdecimal():
            gaps[int(age)] = mapped(series, nats_of_k3)
    return dict(sorted(gaps.items()))


def policy_distance(run: RunData, steps: Sequence[int]) -> list[float]:
    """Return for each step the nats that the policy moved before it: Σ sqrt(2 ppo_kl) of the steps before."""
    moved = run.get("actor/ppo_kl").by_step()
    total, distances = 0.0, []
    for step in steps:
        distances.append(total)
        total += nats_of_k3(2 * moved.get(step, 0.0))
    return distances


def measures_of_gap(run: RunData) -> list[tuple[Series, str]]:
    """The gap by step in each of the ways in which it was logged, with its unit."""
    root = mapped(run.get(K3), nats_of_k3)
    measures = [(run.get(GAP), "nats per token (mean |log-ratio|)"), (root, "nats per token (sqrt(k3))")]
    return [(series, unit) for series, unit in measures if len(series)]


def at_the_start(gap: Series) -> float:
    """The mean of the first two steps."""
    return math.fsum(gap.values[:2]) / len(gap.values[:2])
