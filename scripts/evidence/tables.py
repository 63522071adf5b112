"""From runs to a page: a table with all seeds, their mean and an interval over seeds and prompts, and a
figure."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from evidence.study import Study

from verl_rc.insight.picture import COLOURS, write_picture
from verl_rc.study.runs import Run
from verl_rc.study.standing import area
from verl_rc.study.study import ACCURACY, PROMPTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FALL = 0.10
"""A run has collapsed when its accuracy ends this far below its best."""

MEANS = {
    "mean age": "async/token_age/mean",
    "mean ESS": "rollout_corr/rollout_is_eff_sample_size",
    "mean gap (k3, nats)": "rollout_corr/k3_kl",
    "survival of updates": "sync/update_survival",
    "weights that changed": "sync/changed_weights",
}
"""Columns of the table: means over all steps of all runs of an arm."""


def interval(shares: Sequence[float], prompts: int = PROMPTS, draws: int = 4000) -> tuple[float, float]:
    """90 % bootstrap interval of the mean of ``shares``: seeds are drawn with replacement, then the prompts
    of each."""
    rng = np.random.default_rng(0)
    seeds = rng.choice(np.asarray(shares), size=(draws, len(shares)))
    low, high = np.quantile(rng.binomial(prompts, seeds).mean(axis=1) / prompts, [0.05, 0.95])
    return float(low), float(high)


def has_collapsed(run: Run) -> bool:
    """Ended in an error, or ``FALL`` below its own best accuracy."""
    values = run.accuracies
    return run.exit_status != 0 or not values or values[-1] < max(values) - FALL


def steps_of_collapse(runs: Sequence[Run]) -> dict[int, int]:
    """By the seed of each run that fell, the first validation from which on it stayed ``FALL`` below its
    best."""
    curves = {run.seed: run.curves[ACCURACY] for run in runs if run.accuracies}
    below = {
        seed: [value < max(value for _, value in curve) - FALL for _, value in curve]
        for seed, curve in curves.items()
    }
    return {
        seed: next(step for place, (step, _) in enumerate(curve) if all(below[seed][place:]))
        for seed, curve in curves.items()
        if below[seed][-1]
    }


def by_arm(study: Study, runs: Mapping[tuple[str, int], Run]) -> Iterator[tuple[str, list[Run]]]:
    """The runs of each arm that has any, in the order of the study."""
    for arm in study.arms:
        if arm_runs := [runs[arm, seed] for seed in study.seeds if (arm, seed) in runs]:
            yield arm, arm_runs


def last_accuracies(runs: Sequence[Run]) -> list[float]:
    """Validation accuracy at the end of each run that has any."""
    return [values[-1] for run in runs if (values := run.accuracies)]


def in_words(shares: Sequence[float]) -> str:
    """Three digits of each."""
    return ", ".join(f"{share:.3f}" for share in shares) or "—"


def headline(staleness: Study, runs: Mapping[tuple[str, int], Run]) -> list[str]:
    """The main result: accuracy by seed, with samples eight steps old, without correction and with it; none
    before its runs."""
    arm_runs = dict(by_arm(staleness, runs))
    without, weighed = (
        arm_runs.get(f"k8 {correction} lr1", []) for correction in ("disabled", "decoupled_seq_is")
    )
    began = " or ".join(
        sorted({f"{values[0]:.3f}" for run in (*without, *weighed) if (values := run.accuracies)})
    )
    text = (
        f"In short: with samples up to eight steps old, accuracy went from {began} to "
        f"{in_words(last_accuracies(without))} (one number for each seed) without correction, and to "
        f"{in_words(last_accuracies(weighed))} with sequence weights."
    )
    return [textwrap.fill(text, 100)] if without and weighed else []


def table(study: Study, runs: Mapping[tuple[str, int], Run]) -> list[str]:
    """A Markdown table with a row for each arm; a mean that no arm has gets no column."""
    means = {
        title: [_mean(arm_runs, name) for _, arm_runs in by_arm(study, runs)] for title, name in MEANS.items()
    }
    means = {title: cells for title, cells in means.items() if set(cells) != {"—"}}
    titles = [
        "arm",
        "accuracy at the end, by seed",
        "mean",
        "90 % interval",
        "over the run",
        "collapsed",
        *means,
    ]
    rows = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for place, (arm, arm_runs) in enumerate(by_arm(study, runs)):
        last = last_accuracies(arm_runs)
        mean = f"{sum(last) / len(last):.3f}" if last else "—"
        # With one seed nothing is known of others.
        bounds = " to ".join(f"{bound:.3f}" for bound in interval(last)) if len(last) > 1 else "—"
        collapsed = f"{sum(map(has_collapsed, arm_runs))} of {len(arm_runs)}"
        if steps := steps_of_collapse(arm_runs):
            collapsed += f": {', '.join(f'seed {seed} at step {step}' for seed, step in steps.items())}"
        further = [cells[place] for cells in means.values()]
        over_the_run = in_words([area(run)[0] for run in arm_runs])
        rows.append(
            f"| {' | '.join([arm, in_words(last), mean, bounds, over_the_run, collapsed, *further])} |"
        )
    return rows


def _mean(runs: Sequence[Run], name: str) -> str:
    """The mean over all steps of all runs."""
    values = [value for run in runs for _, value in run.curves.get(name, [])]
    return f"{sum(values) / len(values):.3g}" if values else "—"


def draw(name: str, study: Study, runs: Mapping[tuple[str, int], Run], folder: Path) -> None:
    """Accuracy over steps: a line for each seed, a colour for each arm, a picture for each of
    ``study.figures``."""
    for word in study.figures:
        arms = [(arm, arm_runs) for arm, arm_runs in by_arm(study, runs) if word in arm.split()]
        if arms:
            write_picture(folder / f"{name}_{word}.png", (8.0, 4.4), partial(_draw, arms=arms))


def _draw(figure: "Figure", arms: Sequence[tuple[str, list[Run]]]) -> None:
    panel = figure.subplots()
    panel.set_title("Greedy accuracy on the validation prompts")
    panel.set_xlabel("training step")
    panel.set_ylabel("share of right answers")
    panel.set_ylim(0, 1.03)
    for place, (arm, runs) in enumerate(arms):
        style = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": ("-", "--", ":", "-.")[place // len(COLOURS) % 4],
        }
        for number, run in enumerate(runs):
            steps, values = zip(*run.curves.get(ACCURACY, []) or [(0, 0.0)], strict=True)
            panel.plot(steps, values, linewidth=1.2, label="_" if number else arm, **style)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def minutes_of(study: Study, runs: Mapping[tuple[str, int], Run]) -> tuple[float, float]:
    """Minutes of one run, the median of ``runs`` or what was announced, and of the whole study on two
    cores."""
    each = float(np.median([run.seconds for run in runs.values()])) / 60 if runs else study.minutes
    return each, each * len(study.arms) * len(study.seeds) / study.runs_at_a_time


def _quick_look(study: Study, runs: Mapping[tuple[str, int], Run], minutes: float) -> Iterator[str]:
    """What ``--quick`` shows, once its runs are here."""
    seed = study.seeds[0]
    ends = {arm: runs[arm, seed].accuracies[-1:] for arm in study.quick if (arm, seed) in runs}
    if len(ends) == len(study.quick):
        sentences = ", ".join(f"{arm} {end[0]:.3f}" if end else f"{arm} failed" for arm, end in ends.items())
        yield (
            f"With `--quick`, some {minutes * len(ends) / study.runs_at_a_time:.0f} minutes, seed {seed} "
            f"alone: {sentences}."
        )


def section(name: str, study: Study, runs: Mapping[tuple[str, int], Run]) -> list[str]:
    """The blocks of the page on one study: question, what was expected, what was found, how to run it
    again."""
    number = sum(len(arm_runs) for _, arm_runs in by_arm(study, runs))
    each, all_minutes = minutes_of(study, runs)
    all_runs = len(study.arms) * len(study.seeds)
    figures = [word for word in study.figures if any(word in arm.split() for arm, _ in by_arm(study, runs))]
    pictures = [f"![accuracy over steps, arms with {word}](evidence/{name}_{word}.png)" for word in figures]
    blocks = ["\n".join(table(study, runs)), *pictures] if runs else []
    single = sum(len(arm_runs) == 1 for _, arm_runs in by_arm(study, runs))
    caution = f" {single} arms have one seed only, which says nothing of others." if single else ""
    cores = " --cores 0,1" if study.runs_at_a_time > 1 else ""
    machines = sorted({run.machine or "not recorded" for run in runs.values()})
    took = f" A run took {each:.1f} minutes (median). Machine: {'; '.join(machines)}." if runs else ""
    prose = (
        study.question,
        f"Expected, before the first run: {study.expectation}",
        *([f"Found: {study.found}"] if runs else []),
        *([f"What would change this: {study.would_change}"] if runs and study.would_change else []),
        f"Run with `python -m scripts.evidence {name}{cores}`, some {all_minutes:.0f} minutes on two cores: "
        f"{number} of {all_runs} runs are here.{caution}{took}",
        *_quick_look(study, runs, each),
    )
    return [f"## {name}", *(textwrap.fill(paragraph, 100) for paragraph in prose), *blocks]
