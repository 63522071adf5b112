"""Does anything that a step reports predict a collapse? Runs are divided before anything is looked at: one
half chooses thresholds, the other half is reported.

A run collapses at the first validation from which on it stays ``FALL`` below its best (``tables``). The
``HORIZON`` steps before the validation ahead of that one are to be told from the steps of runs that do not
collapse.
"""

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import md5
from statistics import median

import numpy as np
from evidence.tables import steps_of_collapse
from numpy.typing import NDArray

from verl_rc.health.ranges import HealthHistory, judge_health
from verl_rc.study.runs import Run
from verl_rc.study.study import ACCURACY

HORIZON = 10
WINDOW = 5
"""Steps whose mean is looked at, the newest and those before it."""
DRAWS = 2000
PATIENCE = 3
"""Steps after which the trainer warns of a metric outside its healthy range."""
QUESTION = "Does anything that a step reports tell a collapse before it is seen?"
HOW = (
    "The {horizon} steps before the last sound validation of a run that falls are to be told from all steps "
    "of runs that do not fall. {early} runs fell before their second validation: nothing can warn of these, "
    "and they are left out; {fell} are left. Signals are means of {window} steps. Runs are divided by their "
    "names, before anything is looked at: one half chooses each threshold (the largest difference between "
    "the share of alarms before falls and elsewhere), the other half is told here. Intervals are over runs. "
    "No expectation was written down."
)
FOUND = (
    "The level of the gap tells best, with few false alarms, but less than half of the falls have one. It "
    "says which runs are under strain, those with old samples at a high rate, more than when one of them "
    "falls: how the gap has grown within a run says little. The effective sample size orders steps as well, "
    "but the threshold that one half chose is worthless in the other: few runs with weights fall. Gradient "
    "norms are lower before falls than elsewhere, and warn of nothing. The trainer's own warning about the "
    "gap is as good as the chosen threshold; that about the effective sample size came before no fall. So a "
    "warning says that something is wrong with the samples, and is no forecast."
)
Series = Mapping[int, float]
Values = NDArray[np.float64]


def smooth(points: Iterable[Sequence[float]]) -> Series:
    """Means over ``WINDOW`` steps, from the step on that has as many; step 0 is a validation alone."""
    steps, values = [], []
    for step, value in points:
        if step > 0:
            steps.append(int(step))
            values.append(value)
    return {
        steps[place]: float(np.mean(values[place + 1 - WINDOW : place + 1]))
        for place in range(WINDOW - 1, len(steps))
    }


def growth(series: Series) -> Series:
    """Each value over the median of those before it, from the second window on."""
    steps = list(series)
    return {
        step: series[step] / max(median(series[before] for before in steps[:place]), 1e-12)
        for place, step in enumerate(steps)
        if place >= WINDOW
    }


def below_best(series: Series) -> Series:
    """How far each value is below the best until then."""
    best, found = -np.inf, {}
    for step, value in series.items():
        best = max(best, value)
        found[step] = best - value
    return found


def _level(name: str, sign: float = 1.0) -> Callable[[Run], Series]:
    return lambda run: {step: sign * value for step, value in smooth(run.curves.get(name, [])).items()}


_GAP, _NORM, _ESS = "rollout_corr/k3_kl", "actor/grad_norm", "rollout_corr/rollout_is_eff_sample_size"
SIGNALS: Mapping[str, Callable[[Run], Series]] = {
    "effective sample size, low": _level(_ESS, -1.0),
    "gap (k3), high": _level(_GAP),
    "gap (k3), grown": lambda run: growth(_level(_GAP)(run)),
    "gradient norm, high": _level(_NORM),
    "gradient norm, grown": lambda run: growth(_level(_NORM)(run)),
    "reward, below its best": lambda run: below_best(_level("critic/score/mean")(run)),
}
"""By name, a number for each step: the higher, the more alarming."""


@dataclass(frozen=True)
class Watched:
    """A run, and when it fell."""

    run: Run
    last_sound: int | None
    """The validation ahead of the one that shows the fall; None: it did not fall."""

    def values(self, signal: Callable[[Run], Series]) -> Values:
        """Those that count: of the steps before the fall, or of all steps of a run that did not fall."""
        series = signal(self.run)
        if self.last_sound is None:
            return np.array(list(series.values()))
        first = self.last_sound - HORIZON
        return np.array([value for step, value in series.items() if first < step <= self.last_sound])


def watch(runs: Iterable[Run]) -> list[Watched]:
    """Runs that fell after their second validation, or not at all; nothing warns of a fall at the first."""
    watched = []
    for run in runs:
        steps = [step for step, _ in run.curves.get(ACCURACY, [])]
        fell = steps_of_collapse([run]).get(run.seed)
        if fell is None and run.exit_status == 0 and steps:
            watched.append(Watched(run, None))
        elif fell is not None and (sound := max((step for step in steps if step < fell), default=0)) > 0:
            watched.append(Watched(run, sound))
    return watched


def is_reported(study: str, run: Run) -> bool:
    """Whether a run is of the half that is reported; its name alone decides."""
    return md5(f"{study} {run.arm} {run.seed}".encode(), usedforsecurity=False).digest()[0] % 2 == 1


def area_under_curve(alarming: Values, calm: Values) -> float:
    """The chance that a step before a fall has the higher value: the area under the ROC curve, ties half."""
    ordered = np.sort(calm)
    below, not_above = (np.searchsorted(ordered, alarming, side=side) for side in ("left", "right"))
    return float((below + not_above).mean() / (2 * len(ordered)))


def threshold_of(alarming: Values, calm: Values) -> float:
    """The value that tells the two apart best: the largest difference of the shares at or above it."""
    candidates = np.unique(alarming)
    caught = [(alarming >= value).mean() - (calm >= value).mean() for value in candidates]
    return float(candidates[int(np.argmax(caught))])


@dataclass(frozen=True)
class Finding:
    """What a signal is worth on the half that is reported."""

    falls: int
    healthy_runs: int
    auc: float
    interval: tuple[float, float]
    """90 %, over runs."""
    warned: int
    """Of ``falls``: those with an alarm within the horizon."""
    lead: float | None
    """Median steps from the first of these alarms to the last sound validation; None: no alarm."""
    false_alarms: float
    """Per 1,000 steps of runs that did not fall."""

    @property
    def predicts(self) -> bool:
        """Whether the interval lies above one half."""
        return self.interval[0] > 0.5


def examine(
    signal: Callable[[Run], Series],
    choosing: Sequence[Watched],
    reported: Sequence[Watched],
    threshold: float | None = None,
) -> Finding | None:
    """What a signal is worth, at a ``threshold`` or at that which the first half chooses. None: too few runs
    have the signal."""
    (alarming, calm), (falls, healthy) = (_values(signal, half) for half in (choosing, reported))
    if not (alarming and calm and falls and healthy):
        return None
    if threshold is None:
        threshold = threshold_of(np.concatenate(alarming), np.concatenate(calm))
    rng, draws = np.random.default_rng(0), []
    for _ in range(DRAWS):
        drawn = [[half[k] for k in rng.integers(len(half), size=len(half))] for half in (falls, healthy)]
        draws.append(area_under_curve(*map(np.concatenate, drawn)))
    low, high = np.quantile(draws, [0.05, 0.95])
    alarms = [values >= threshold for values in falls]
    leads = [len(of_run) - 1 - int(np.argmax(of_run)) for of_run in alarms if of_run.any()]
    calm_steps = np.concatenate(healthy)
    return Finding(
        len(falls),
        len(healthy),
        area_under_curve(np.concatenate(falls), calm_steps),
        (float(low), float(high)),
        len(leads),
        median(leads) if leads else None,
        1000 * float((calm_steps >= threshold).mean()),
    )


def _values(signal: Callable[[Run], Series], half: Sequence[Watched]) -> tuple[list[Values], list[Values]]:
    """Of runs that fell, and of those that did not; runs without the signal are left out."""
    found: tuple[list[Values], list[Values]] = [], []
    for watched in half:
        if len(values := watched.values(signal)):
            found[watched.last_sound is None].append(values)
    return found


def alert(run: Run, name: str) -> Series:
    """1 at the steps at which the trainer's own warning about a metric stands, else 0."""
    found, history = {}, HealthHistory()
    for step, value in run.curves.get(name, []):
        _, history = judge_health({name: value}, int(step), history)
        found[int(step)] = float(history.steps_outside.get(name, 0) >= PATIENCE)
    return found


def divided(studies: Mapping[str, Iterable[Run]]) -> tuple[list[Watched], list[Watched]]:
    """The half that chooses thresholds, and the half that is reported."""
    halves: tuple[list[Watched], list[Watched]] = [], []
    for name, runs in studies.items():
        for watched in watch(runs):
            halves[is_reported(name, watched.run)].append(watched)
    return halves


def _row(name: str, found: Finding) -> str:
    low, high = found.interval
    lead = "—" if found.lead is None else f"{found.lead:g}"
    cells = [name, f"{found.falls}, {found.healthy_runs}", f"{found.auc:.2f}", f"{low:.2f} to {high:.2f}"]
    return f"| {' | '.join([*cells, str(found.warned), lead, f'{found.false_alarms:.0f}'])} |"


def section(studies: Mapping[str, Iterable[Run]]) -> list[str]:
    """The blocks of the page, from the kept runs by study."""
    choosing, reported = divided(studies)
    titles = ["signal", "runs that fell, that did not", "AUC", "90 % interval", "falls with an alarm"]
    rows = [
        f"| {' | '.join([*titles, 'steps ahead, at most 9', 'false alarms in 1,000 steps'])} |",
        "|---" * 7 + "|",
    ]
    predicting = []
    for name, signal in SIGNALS.items():
        if found := examine(signal, choosing, reported):
            rows.append(_row(name, found))
            predicting += [name] if found.predicts else []
    for metric in (_GAP, _ESS):
        if found := examine(partial(alert, name=metric), choosing, reported, threshold=1.0):
            rows.append(_row(f"the warning about `{metric}`", found))
    fell = sum(watched.last_sound is not None for watched in (*choosing, *reported))
    early = sum(len(steps_of_collapse([run])) for runs in studies.values() for run in runs) - fell
    prose = (
        QUESTION,
        HOW.format(horizon=HORIZON, window=WINDOW, early=early, fell=fell),
        f"Found: {FOUND} Signals whose interval lies above one half: {', '.join(predicting) or 'none'}.",
        "Made by `python -m scripts.evidence page` from the runs of the studies above.",
    )
    return ["## early_warning", *(textwrap.fill(paragraph, 100) for paragraph in prose), "\n".join(rows)]
