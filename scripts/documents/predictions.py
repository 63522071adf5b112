"""Whether something known early tells what runs of CorrectionBench come to: tables of docs/leaderboard.md."""

from collections.abc import Sequence
from statistics import mean

import numpy as np
from documents.markdown import table
from documents.tables import EXACT, track_scores
from evidence.bill import rank_correlation

from verl_rc.bench.results import read_results
from verl_rc.bench.standing import Result
from verl_rc.study.bench import all_runs
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


def exact_track_predictions() -> str:
    """Whether the exact track orders methods as the runs of the short track do."""
    stored = read_results(EXACT)
    scores = [score for score in track_scores("short") if score.method in stored]
    results = [Result.from_json(score.method, stored[score.method]) for score in scores]
    judged = {
        (name, f"error, {condition}"): [-result.findings[condition].best_error for result in results]
        for name, condition in _PREDICTED_BY.items()
    }
    judged["frozen", "frozen"] = [result.flows["frozen"].score for result in results]
    rows = []
    for (name, column), expected in judged.items():
        pairs = [
            [pair] for pair in zip(expected, (score.by_condition[name] for score in scores), strict=True)
        ]
        correlation, low, high = _correlation(pairs)
        rows.append([name, column, f"{correlation:.2f}", f"{low:.2f} to {high:.2f}"])
    head = ["short track", "exact track", "rank correlation", "90 % interval"]
    return f"{table(head, rows)}\n{len(scores)} methods.\n"


def first_step_predictions() -> str:
    """Whether what runs report in their first steps orders them as their scores do."""
    head = ["track", "condition", "methods, runs", *(f"`{signal}`" for signal in SIGNALS)]
    rows = []
    for track in TRACKS:
        methods, runs = all_runs(track)
        judges = [method for method in methods if track != "short" or method not in SUGGESTED_BY]
        for condition in TRACKS[track].conditions:
            runs_by_method = [
                [run for seed in SEEDS if (run := runs.get((f"{condition} {method}", seed)))]
                for method in judges
            ]
            reporting = [
                own_runs
                for own_runs in runs_by_method
                if own_runs and all(_first(run, SIGNALS[0]) for run in own_runs)
            ]
            if len(reporting) > 1:
                rows.append([track, condition, *_cells(reporting)])
    return table(head, rows)


def _cells(methods: Sequence[Sequence[Run]]) -> list[str]:
    cells = [f"{len(methods)}, {sum(map(len, methods))}"]
    scores = [[area(run)[0] for run in runs] for runs in methods]
    for signal in SIGNALS:
        pairs = [
            [(mean(_first(run, signal)), score) for run, score in zip(runs, run_scores, strict=True)]
            for runs, run_scores in zip(methods, scores, strict=True)
        ]
        cells.append("{:.2f} ({:.2f} to {:.2f})".format(*_correlation(pairs)))
    return cells


def _first(run: Run, signal: str) -> list[float]:
    return [value for step, value in run.curves.get(signal, []) if step in FIRST_STEPS]


def _correlation(methods: Sequence[Sequence[tuple[float, float]]]) -> tuple[float, float, float]:
    """Rank correlation of pairs, and its 90 % bootstrap interval over the methods that have them."""

    def correlation(sample: Sequence[Sequence[tuple[float, float]]]) -> float:
        first, second = zip(*(pair for pairs in sample for pair in pairs), strict=True)
        return rank_correlation(first, second)

    draws = np.random.default_rng(0).integers(len(methods), size=(DRAWS, len(methods)))
    low, high = np.quantile([correlation([methods[k] for k in draw]) for draw in draws], [0.05, 0.95])
    return correlation(methods), float(low), float(high)
