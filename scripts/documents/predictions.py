"""Whether something known early tells what runs of CorrectionBench come to: tables of docs/leaderboard.md."""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from documents.tables import EXACT
from evidence.bill import rank_correlation

from verl_rc.bench.results import read_results
from verl_rc.bench.standing import Result
from verl_rc.study.bench import all_runs, all_scores
from verl_rc.study.runs import Run
from verl_rc.study.standing import area
from verl_rc.study.tracks import SEEDS, TRACKS

_PREDICTED_BY = {"k0": "fresh", "k1": "1 step", "k4": "4 steps", "k8": "8 steps"}
"""By condition of the short track, the one of the exact track with samples as old."""
FIRST_STEPS = range(2, 6)
"""Those whose mean is looked at: the first one has no gradient before it."""
SIGNALS = ("actor/grad_cosine", "rollout_corr/k3_kl", "actor/grad_norm", "critic/score/mean")
DRAWS = 400
"""Of the bootstrap."""
SUGGESTED_BY = ("bypass_pg_is", "loss_mode=cispo", "loss_mode=gspo", "prefix_is")
"""Methods whose runs on the short track suggested the first signal: they do not judge it."""


def of_exact_track() -> str:
    """Whether the exact track orders methods as the runs of the short track do."""
    kept = read_results(EXACT)
    scores = [score for score in all_scores("short") if score.method in kept]
    results = [Result.from_json(score.method, kept[score.method]) for score in scores]
    judged = {
        (name, f"error, {condition}"): [-result.findings[condition].best_error for result in results]
        for name, condition in _PREDICTED_BY.items()
    }
    judged["frozen", "frozen"] = [result.flows["frozen"].score for result in results]
    lines = ["| short track | exact track | rank correlation | 90 % interval |", "|---|---|---|---|"]
    for (name, column), expected in judged.items():
        pairs = [
            [pair] for pair in zip(expected, (score.by_condition[name] for score in scores), strict=True)
        ]
        whole, low, high = _correlation(pairs)
        lines.append(f"| {name} | {column} | {whole:.2f} | {low:.2f} to {high:.2f} |")
    return "".join(f"{line}\n" for line in [*lines, "", f"{len(scores)} methods."])


def of_first_steps() -> str:
    """Whether what runs report in their first steps orders them as their scores do."""
    head = ["track", "condition", "methods, runs", *(f"`{signal}`" for signal in SIGNALS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for track in TRACKS:
        methods, runs = all_runs(track)
        judges = [method for method in methods if track != "short" or method not in SUGGESTED_BY]
        for condition in TRACKS[track].conditions:
            by_method = [
                [run for seed in SEEDS if (run := runs.get((f"{condition} {method}", seed)))]
                for method in judges
            ]
            having = [found for found in by_method if found and all(_first(run, SIGNALS[0]) for run in found)]
            if len(having) > 1:
                lines.append(f"| {track} | {condition} | {' | '.join(_cells(having))} |")
    return "".join(f"{line}\n" for line in lines)


def _cells(methods: Sequence[Sequence[Run]]) -> list[str]:
    cells = [f"{len(methods)}, {sum(map(len, methods))}"]
    for signal in SIGNALS:
        pairs = [[(mean(_first(run, signal)), area(run)[0]) for run in of_method] for of_method in methods]
        cells.append("{:.2f} ({:.2f} to {:.2f})".format(*_correlation(pairs)))
    return cells


def _first(run: Run, signal: str) -> list[float]:
    return [value for step, value in run.curves.get(signal, []) if step in FIRST_STEPS]


def _correlation(methods: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Rank correlation of pairs, and its 90 % bootstrap interval over the methods that have them."""

    def of(chosen: Sequence[Sequence[tuple[float, float]]]) -> float:
        first, second = zip(*(pair for of_method in chosen for pair in of_method), strict=True)
        return rank_correlation(first, second)

    draws = np.random.default_rng(0).integers(len(methods), size=(DRAWS, len(methods)))
    low, high = np.quantile([of([methods[k] for k in draw]) for draw in draws], [0.05, 0.95])
    return of(methods), float(low), float(high)
