"""Several runs side by side: last tenths with intervals, seeds of one configuration, where runs diverge."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations

from verl_rc.insight.page.tables import differing_settings
from verl_rc.insight.page.text import escaped, number, table
from verl_rc.insight.run_folder import RunData, Series
from verl_rc.insight.verdict.estimates import Mean, bootstrap_interval, last_tenth, mean_of
from verl_rc.insight.verdict.learning import source_validation

MOST_RUNS = 12
_COMPARED = (
    "critic/score/mean",
    "response_length/mean",
    "actor/entropy",
    "actor/update_entropy",
    "actor/grad_norm",
    "actor/ppo_kl",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/k3_kl",
    "sync/rollout_gap_mean",
    "rollout_corr/rollout_rs_masked_fraction",
    "timing_s/step",
    "perf/throughput",
)
_SEED_KEYS = {"trainer.seed", "data.seed", "actor_rollout_ref.rollout.seed"}
_SEED = "trainer.seed"
"""The seed that runs are paired by."""
_FEWEST_PAIRS = 2
_PLACE_KEYS = {
    "trainer.default_local_dir",
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.resume_mode",
}
"""Keys of a run's place, which do not change what it computes."""
_T_90 = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796)
"""Quantiles 0.95 of Student's t for 1 to 11 degrees of freedom."""
_WINDOWS, _FEWEST_OF_WINDOW = 20, 8
"""Windows over which the difference of two runs is averaged, and the fewest steps of one."""


def comparison_panel(runs: Sequence[RunData]) -> str:
    """Tables of several runs; a run on its own proves nothing about a difference, and the panel says so."""
    compared = [(name, [mean_of(last_tenth(run.get(name))) for run in runs]) for name in _COMPARED]
    rows = [(escaped(name), *map(_cell, means)) for name, means in compared if any(means)]
    rows += _validation_rows(runs)
    head = ("last tenth", *(escaped(run.name) for run in runs))
    groups = _seed_groups(runs)
    caution = (
        "<p>Intervals are of the steps of one run (90 %, block bootstrap). They do not say whether another "
        "seed would give the same: with one run a side no difference is shown to be more than chance.</p>"
    )
    return (
        f"{caution}{table(head, rows)}{_seed_tables(groups)}{_paired_tables(groups)}<h3>Where they "
        f"diverge</h3>{_divergence_table(runs)}<h3>Keys that differ</h3>{differing_settings(runs)}"
    )


def _cell(mean: Mean | None) -> str:
    if mean is None:
        return ""
    return number(mean.value) + (
        f" ({number(mean.interval[0])} to {number(mean.interval[1])})" if mean.interval else ""
    )


def _validation_rows(runs: Sequence[RunData]) -> list[tuple[str, ...]]:
    """The last validation of each source."""
    by_run = [dict(source_validation(run)) for run in runs]
    names = sorted({name for sources in by_run for name in sources})
    return [
        (
            f"validation {escaped(name)}",
            *(number(sources[name].values[-1]) if name in sources else "" for sources in by_run),
        )
        for name in names
    ]


def _seed_groups(runs: Sequence[RunData]) -> list[list[RunData]]:
    """Groups of two or more runs whose configurations differ in their seeds only."""
    groups: dict[str, list[RunData]] = defaultdict(list)
    for run in runs:
        if run.settings:
            shared = {
                key: run.settings[key] for key in sorted(run.settings.keys() - _SEED_KEYS - _PLACE_KEYS)
            }
            groups[repr(shared)].append(run)
    return [group for group in groups.values() if len(group) > 1]


def _seed_tables(groups: Sequence[Sequence[RunData]]) -> str:
    """Mean over the seeds with its t interval."""
    parts = []
    for group in groups:
        ends = [_ends(run) for run in group]
        rows = []
        for name in _common_names(ends):
            means = [run_ends[name] for run_ends in ends]
            rows.append((escaped(name), f"{number(statistics.fmean(means))} ± {number(t_interval(means))}"))
        names = ", ".join(run.name for run in group)
        parts.append(
            f"<h3>{len(group)} seeds of one configuration: {escaped(names)}</h3>"
            + table(("last tenth", "mean, 90 %"), rows)
        )
    return "".join(parts)


def _ends(run: RunData) -> dict[str, float]:
    """Where a run ended: means of last tenths, and the last validation of each source."""
    means = {name: mean_of(last_tenth(run.get(name))) for name in _COMPARED}
    ends = {name: mean.value for name, mean in means.items() if mean is not None}
    return ends | {f"validation {name}": series.values[-1] for name, series in source_validation(run)}


def _common_names(ends: Sequence[Mapping[str, float]]) -> list[str]:
    """Names that all runs have, in the order of the first run."""
    return [name for name in ends[0] if all(name in run_ends for run_ends in ends)]


def _paired_tables(groups: Sequence[Sequence[RunData]]) -> str:
    """Of any two configurations that ran with the same seeds, the mean difference of runs with equal
    seeds."""
    parts = []
    for first, second in combinations(groups, 2):
        first_runs, second_runs = (
            {run.settings.get(_SEED): run for run in group} for group in (first, second)
        )
        shared = [seed for seed in first_runs if seed is not None and seed in second_runs]
        if len(shared) < _FEWEST_PAIRS:
            continue
        pairs = [(_ends(first_runs[seed]), _ends(second_runs[seed])) for seed in shared]
        rows = []
        for name in _common_names([run_ends for pair in pairs for run_ends in pair]):
            differences = [b[name] - a[name] for a, b in pairs]
            mean, half = statistics.fmean(differences), t_interval(differences)
            outcome = ("higher" if mean > 0 else "lower") if abs(mean) > half else "not told apart"
            rows.append((escaped(name), f"{number(mean)} ± {number(half)}", outcome))
        names = (
            f"{', '.join(second_runs[seed].name for seed in shared)} less "
            f"{', '.join(first_runs[seed].name for seed in shared)}"
        )
        head = ("last tenth", "mean difference, 90 %", "")
        parts.append(f"<h3>{len(shared)} pairs of equal seeds: {escaped(names)}</h3>{table(head, rows)}")
    caution = (
        "<p>One row in ten lies outside by chance alone: look at the metrics that were to be compared, not "
        "at the most different ones.</p>"
    )
    return "".join([*parts, caution] if parts else [])


def t_interval(values: Sequence[float]) -> float:
    """Half the 90 % interval of the mean of independent values."""
    return _T_90[min(len(values) - 2, len(_T_90) - 1)] * statistics.stdev(values) / math.sqrt(len(values))


def first_divergence(first: Series, second: Series) -> int | None:
    """The first step from which on two runs differ; None: they do not diverge.

    The difference is averaged over windows of a twentieth of the steps. Runs diverge at the first window
    whose mean lies three standard errors from 0, if at least two windows follow, all of them have the same
    sign, and so has the interval of the mean from that window on.
    """
    first_values, second_values = first.by_step(), second.by_step()
    steps = sorted(first_values.keys() & second_values.keys())
    width = max(_FEWEST_OF_WINDOW, len(steps) // _WINDOWS)
    differences = [first_values[step] - second_values[step] for step in steps]
    starts = range(0, len(steps) - width + 1, width)
    windows = [differences[start : start + width] for start in starts]
    means = [statistics.fmean(window) for window in windows]
    first_same_sign = len(means)
    while first_same_sign > 0 and means and means[first_same_sign - 1] * means[-1] > 0:
        first_same_sign -= 1
    for index in range(first_same_sign, len(means) - 2):
        if abs(means[index]) > 3 * statistics.stdev(windows[index]) / math.sqrt(width):
            interval = bootstrap_interval(differences[starts[index] :])
            return steps[starts[index]] if interval is not None and interval[0] * interval[1] > 0 else None
    return None


def _divergence_table(runs: Sequence[RunData]) -> str:
    first = runs[0]
    rows = []
    for name in _COMPARED:
        cells = []
        for run in runs[1:]:
            if not (first.has(name) and run.has(name)):
                cells.append("")
            else:
                step = first_divergence(first.get(name), run.get(name))
                cells.append("not" if step is None else f"from step {step}")
        if any(cells):
            rows.append((escaped(name), *cells))
    return table((f"against {escaped(first.name)}", *(escaped(run.name) for run in runs[1:])), rows)
