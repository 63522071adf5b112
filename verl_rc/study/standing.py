"""What runs of a track say of a method: a score with its interval, and which methods it can be told apart
from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_rc.study.runs import MixedResultsError, Run
from verl_rc.study.study import ACCURACY, PROMPTS
from verl_rc.study.tracks import CONTROL, SEEDS, Track

DRAWS = 4000
"""Of the bootstrap."""
SAME_START = 0.1
"""Largest difference of the accuracies that two runs of one model begin with: an engine in fp8 answers
validations, too."""
STEPS = "trainer.total_training_steps="
"""How the override begins that says how long a run is."""

Array = NDArray[np.float64]


def area(run: Run) -> tuple[float, float]:
    """Mean accuracy over the steps of a run, by the trapezoidal rule, and its deviation over prompts.

    What a run that failed did not reach counts as 0. The deviation is that of prompts which are as hard at
    every validation: an upper bound.
    """
    curve = run.curves.get(ACCURACY, [])
    length = next(int(text.removeprefix(STEPS)) for text in run.overrides if text.startswith(STEPS))
    steps, shares = np.array(curve, dtype=np.float64).reshape(-1, 2).T
    deviations = np.sqrt(shares * (1 - shares) / PROMPTS)
    return float(np.trapezoid(shares, steps)) / length, float(np.trapezoid(deviations, steps)) / length


@dataclass(frozen=True, eq=False)
class Score:
    """A method on a track: accuracy relative to the control, by condition and seed."""

    method: str
    conditions: Sequence[str]
    shares: Array
    """``[seeds, conditions]``: area under the accuracy of a run, divided by the control's, the mean over its
    seeds."""
    deviations: Array
    """``[seeds, conditions]``: of ``shares``, over validation prompts."""
    seconds: float
    """Of a step under the first condition: the median."""
    made_on: Sequence[tuple[str, str]]
    """Machines and versions of the packages that compute."""

    @property
    def mean(self) -> float:
        """Over conditions and seeds."""
        return float(self.shares.mean())

    @cached_property
    def interval(self) -> tuple[float, float]:
        """90 % bootstrap interval of the mean over seeds and prompts."""
        return _interval(self.shares, self.deviations)

    @property
    def by_condition(self) -> dict[str, float]:
        """Means over seeds."""
        return dict(zip(self.conditions, self.shares.mean(axis=0).tolist(), strict=True))

    @property
    def worst(self) -> str:
        """The condition with the lowest mean."""
        return min(self.conditions, key=self.by_condition.__getitem__)

    def is_better_than(self, other: "Score") -> bool:
        """Whether the 90 % interval of the mean difference, in pairs of condition and seed, lies above 0."""
        deviations = np.sqrt(self.deviations**2 + other.deviations**2)
        return _interval(self.shares - other.shares, deviations)[0] > 0


def _interval(values: Array, deviations: Array) -> tuple[float, float]:
    """Seeds are drawn with replacement, for all conditions alike; then the prompts of each run."""
    rng = np.random.default_rng(0)
    seeds = rng.integers(len(values), size=(DRAWS, len(values)))
    noise = rng.standard_normal((DRAWS, *values.shape)) * deviations[seeds]
    low, high = np.quantile((values[seeds] + noise).mean(axis=(1, 2)), [0.05, 0.95])
    return float(low), float(high)


def scores(track: Track, methods: Iterable[str], runs: Mapping[tuple[str, int], Run]) -> Iterator[Score]:
    """Of those ``methods`` whose runs, by arm and seed, are all here; none before the control has its own.

    Raises ``MixedResultsError``, see ``require_same_start``.
    """
    controls = [runs[CONTROL, seed] for seed in SEEDS if (CONTROL, seed) in runs]
    if len(controls) < len(SEEDS):
        return
    unit = float(np.mean([area(run)[0] for run in controls]))
    for method in methods:
        keys = [[(f"{name} {method}", seed) for name in track.conditions] for seed in SEEDS]
        if all(key in runs for key in chain.from_iterable(keys)):
            grid = [[runs[key] for key in seed_keys] for seed_keys in keys]
            for run in chain.from_iterable(grid):
                require_same_start(run, controls[0])
            areas = np.array([[area(run) for run in seed_runs] for seed_runs in grid]) / unit
            curves = (first.curves.get("timing_s/step", []) for first, *_ in grid)
            steps = [seconds for curve in curves for _, seconds in curve]
            made_on = {(run.machine, run.versions) for run in chain.from_iterable(grid)}
            yield Score(
                method,
                list(track.conditions),
                areas[..., 0],
                areas[..., 1],
                median(steps) if steps else float("nan"),
                sorted(made_on),
            )


def require_same_start(run: Run, control: Run) -> None:
    """Raises ``MixedResultsError`` where ``run`` began from another model than the control."""
    if not run.accuracies or not control.accuracies:  # it failed before the first validation
        return
    accuracy, expected = run.accuracies[0], control.accuracies[0]
    if abs(accuracy - expected) > SAME_START:
        raise MixedResultsError(
            f"all runs of a track must begin from one model; {run.arm} (seed {run.seed}) begins at an "
            f"accuracy of {accuracy:.2f}, the control at {expected:.2f}. SFT can end in another model on "
            f"another kind of CPU: run the method on the control's kind, "
            f"{control.machine or 'not recorded'}; its runs were made on {run.machine or 'not recorded'}."
        )


@dataclass(frozen=True)
class Standing:
    """A method among the others on a track."""

    track: str
    score: Score
    others: Sequence[Score]

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        score = self.score
        compared = {words: [score.method for score in scores] for words, scores in self.compared().items()}
        return {"score": score.mean, "interval": score.interval, "conditions": score.by_condition, **compared}

    def compared(self) -> dict[str, list[Score]]:
        """The others by how this one differs from them."""
        better = [score for score in self.others if self.score.is_better_than(score)]
        worse = [score for score in self.others if score.is_better_than(self.score)]
        equal = [score for score in self.others if score not in (*better, *worse)]
        return {"better than": better, "worse than": worse, "not separable from": equal}

    def lines(self) -> list[str]:
        """For the console."""
        score = self.score
        rows = [
            f"{name:<10}  {mean:.3f}  ({', '.join(f'{share:.3f}' for share in shares)})"
            for (name, mean), shares in zip(score.by_condition.items(), score.shares.T, strict=True)
        ]
        low, high = score.interval
        return [
            f"{score.method}, {self.track} track: area under the validation accuracy, relative to the "
            "control; mean (by seed)",
            "",
            *rows,
            "",
            f"score {score.mean:.3f}, 90 % interval {low:.3f} to {high:.3f}; worst: {score.worst}",
            *(
                f"{words}: {', '.join(score.method for score in scores)}"
                for words, scores in self.compared().items()
                if scores
            ),
        ]
