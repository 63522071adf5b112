"""The charts of a page: metrics by question, and the lines that a run has for them."""

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.correction import half_ess_length
from verl_rc.insight.verdict.gap_series import missing_mass, z_of_mean_ratio
from verl_rc.metrics.catalog import CATALOG


@dataclass(frozen=True)
class ChartSpec:
    """The content of one chart."""

    title: str
    names: tuple[str, ...]
    """Metrics; ``*`` stands for any text."""
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper edge of a band around the first line."""
    stacked: bool = False
    derived: tuple[str, str, Callable[[RunData], Series]] | None = None
    """A line that is computed from the run: label, unit, values."""


@dataclass(frozen=True)
class Line:
    """One line of a chart."""

    label: str
    series: Series
    low: Series | None = None
    high: Series | None = None


@dataclass(frozen=True)
class Chart:
    """A chart with data."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    about: str
    """A description of the lines."""
    stacked: bool = False
    healthy: tuple[float | None, float | None] | None = None


PANELS: dict[str, tuple[str, tuple[ChartSpec, ...]]] = {
    "learning": (
        "Learning",
        (
            ChartSpec("Validation", ("val-core/*/acc/mean@*", "val-core/*/reward/mean@*")),
            ChartSpec(
                "Reward of training samples", ("critic/score/mean",), ("critic/score/min", "critic/score/max")
            ),
            ChartSpec(
                "Length of responses",
                ("response_length/mean",),
                ("response_length/min", "response_length/max"),
            ),
            ChartSpec("Responses cut off", ("response_length/clip_ratio",)),
            ChartSpec("Entropy", ("actor/entropy", "actor/update_entropy")),
            ChartSpec("Gradient norm", ("actor/grad_norm", "critic/grad_norm")),
            ChartSpec("Clipped tokens", ("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
            ChartSpec("Movement of the policy", ("actor/ppo_kl", "actor/kl_loss")),
            ChartSpec("Learning rate", ("actor/lr", "critic/lr")),
            ChartSpec("Policy loss", ("actor/pg_loss",)),
            ChartSpec("Value: explained variance", ("critic/vf_explained_var",)),
            ChartSpec("Value loss", ("critic/vf_loss",)),
            ChartSpec("Prompts with a signal", ("training/filter_groups/informative_ratio",)),
        ),
    ),
    "environment": (
        "Environment",
        (
            ChartSpec("Messages of a conversation", ("num_turns/mean",), ("num_turns/min", "num_turns/max")),
            ChartSpec("Waits of an episode", ("env/wait_s/mean",), ("env/wait_s/min", "env/wait_s/max")),
            ChartSpec("Failures", ("env/failures", "env/calls_again", "env/hosts_lost")),
            ChartSpec("Calls of tools", ("tool_call_counts/mean",)),
        ),
    ),
    "time": (
        "Where the time goes",
        (
            ChartSpec("Seconds of a step by stage", ("timing_s/*",), stacked=True),
            ChartSpec("Seconds in which the slowest worker computes", ("timing_busy_s/*",)),
            ChartSpec("Seconds of a step", ("timing_s/step",)),
            ChartSpec(
                "Share of the step in which no worker computes",
                ("perf/overhead_fraction", "trainer/idle_ratio"),
            ),
            ChartSpec("Tokens per second and device", ("perf/throughput",)),
            ChartSpec(
                "Useful tokens per second",
                ("perf/useful_tokens_per_second", "perf/rollout_tokens_per_second"),
            ),
            ChartSpec(
                "Memory",
                ("perf/cpu_memory_used_gb", "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"),
            ),
        ),
    ),
    "correction": (
        "Rollout correction",
        (
            ChartSpec(
                "Effective sample size",
                (
                    "rollout_corr/rollout_is_eff_sample_size",
                    "rollout_corr/rollout_is_ess_raw_*",
                    "rollout_corr/rollout_is_ess_applied_*",
                ),
            ),
            ChartSpec("Gap: divergence per token", ("rollout_corr/kl", "rollout_corr/k3_kl")),
            ChartSpec("Gap: mean |log-ratio|", ("sync/rollout_gap_mean", "sync/canary_mean_gap")),
            ChartSpec("Percentiles of the log-ratio", ("rollout_corr/log_ratio_p*",)),
            ChartSpec("What weights would make of it", ("rollout_corr/chi2_token", "rollout_corr/chi2_seq")),
            ChartSpec(
                "Length at which weights of whole rows lose half the sample",
                ("response_length/mean", "response_length/max"),
                derived=("ln 2 / (2 k3)", "tokens", half_ess_length),
            ),
            ChartSpec(
                "Weights",
                (
                    "rollout_corr/rollout_is_mean",
                    "rollout_corr/rollout_is_std",
                    "rollout_corr/rollout_is_max",
                ),
            ),
            ChartSpec(
                "Clipped weights",
                (
                    "rollout_corr/rollout_is_ratio_fraction_high",
                    "rollout_corr/rollout_is_ratio_fraction_low",
                    "rollout_corr/rollout_is_oob_ratio",
                ),
            ),
            ChartSpec(
                "Rejected",
                (
                    "rollout_corr/rollout_rs_masked_fraction",
                    "rollout_corr/rollout_rs_seq_masked_fraction",
                    "rollout_corr/rollout_rs_seq_rejected_fraction",
                ),
            ),
            ChartSpec(
                "Rejected by rule",
                ("rollout_corr/rollout_rs_*_masked_fraction",),
            ),
            ChartSpec("Kept, by kind of token", ("rollout_corr/kept_fraction_*",)),
            ChartSpec(
                "Score of kept and rejected rows",
                ("rollout_corr/kept_score_mean", "rollout_corr/rejected_score_mean"),
            ),
            ChartSpec("Noise on the logits", ("rollout_corr/logit_noise", "rollout_corr/logit_noise_floor")),
            ChartSpec("Noise on the logits, by position", ("rollout_corr/position_*_logit_noise",)),
            ChartSpec("Noise on the logits, by engine", ("rollout_corr/engine_*_logit_noise",)),
            ChartSpec("Temperature", ("rollout_corr/temperature_slope", "rollout_corr/temperature_r2")),
            ChartSpec(
                "Surprisal excess", ("rollout_corr/surprisal_excess", "rollout_corr/surprisal_excess_bound")
            ),
            ChartSpec("Share of the gap in 1 % of the tokens", ("rollout_corr/concentration",)),
            ChartSpec("Missing mass, in standard errors over rows", ("rollout_corr/missing_mass_z",)),
            ChartSpec("Missing mass", (), derived=("k1 - k3 = 1 - mean ratio", "", missing_mass)),
            ChartSpec(
                "Mean ratio less 1, in standard errors",
                (),
                derived=("z over tokens", "", z_of_mean_ratio),
            ),
            ChartSpec("Gap by age of the token", ("rollout_corr/age_*_k3_kl",)),
            ChartSpec(
                "Age of tokens",
                ("rollout_corr/token_age_mean", "async/token_age/mean", "async/group_age/max"),
            ),
            ChartSpec("Gap by turn", ("rollout_corr/turn_*_k3_kl",)),
            ChartSpec("Probabilities of engine and trainer", ("training/rollout_probs_diff_mean",)),
            ChartSpec(
                "Faults: these stay at 0",
                (
                    "rollout_corr/nonfinite_token_fraction",
                    "rollout_corr/safety_clamped_fraction",
                    "rollout_corr/skipped_updates",
                    "actor/nonfinite_gradients",
                ),
            ),
        ),
    ),
    "ledger": (
        "Where sampled tokens went",
        (ChartSpec("Tokens of a step", ("ledger/*_tokens",), stacked=True),),
    ),
}
"""Panels by id: title and charts."""
_SUMS = {"timing_s/step", "ledger/sampled_tokens"}
"""Sums of a stack, which are no part of it."""
_WITHOUT_ZEROS = {"Rejected by rule", "Tokens of a step"}


def charts_of(specs: Sequence[ChartSpec], run: RunData) -> list[Chart]:
    """The charts for which a run has data, each with one line a metric."""
    charts = (_chart(spec, run) for spec in specs)
    return [chart for chart in charts if chart is not None]


def _chart(spec: ChartSpec, run: RunData) -> Chart | None:
    names = _names(spec, run)
    low, high = (run.series.get(edge) for edge in spec.band or ("", ""))
    lines = [
        Line(
            f"{run.their_names[name]} ({name})" if name in run.their_names else name,
            run.series[name],
            low,
            high,
        )
        for name in names
    ]
    if spec.derived is not None:
        derived = spec.derived[2](run)
        lines = [*lines, Line(spec.derived[0], derived)] if len(derived) else []
    if not lines:
        return None
    if spec.stacked:
        lines.sort(key=lambda line: -math.fsum(line.series.finite().values))
    first = CATALOG.find(names[0]) if names else None
    entries = dict.fromkeys(entry for name in names if (entry := CATALOG.find(name)) is not None)
    about = "; ".join(f"{entry.name}: {entry.formula}" for entry in entries)
    unit = spec.derived[1] if spec.derived is not None else "" if first is None else first.unit
    healthy = first.healthy if first is not None and len(names) == 1 else None
    return Chart(spec.title, "" if unit == "1" else unit, tuple(lines), about, spec.stacked, healthy)


def _names(spec: ChartSpec, run: RunData) -> list[str]:
    """Metrics of the run that the chart shows: in the order of the specification, then by name."""
    names: list[str] = []
    for pattern in spec.names:
        matching = (
            [name for name in sorted(run.series) if fnmatch.fnmatchcase(name, pattern)]
            if "*" in pattern
            else [pattern]
        )
        for name in matching:
            if run.has(name) and name not in names and not (spec.stacked and name in _SUMS):
                names.append(name)
    if spec.title in _WITHOUT_ZEROS:
        names = [name for name in names if any(run.get(name).values)]
    return names
