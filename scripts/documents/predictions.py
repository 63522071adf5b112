"""Whether something known early tells what runs of CorrectionBench come to: tables of docs/leaderboard.md."""

import numpy as np
from documents.tables import EXACT
from evidence.bill import rank_correlation

from verl_rc.bench.results import read_results
from verl_rc.bench.standing import Result
from verl_rc.study.bench import all_scores

_PREDICTED_BY = {"k0": "fresh", "k1": "1 step", "k4": "4 steps", "k8": "8 steps"}
"""By condition of the short track, the one of the exact track with samples as old."""


def of_exact_track() -> str:
    """Whether the exact track orders methods as the runs of the short track do, in docs/leaderboard.md."""
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
        pairs = np.array([expected, [score.by_condition[name] for score in scores]])
        draws = np.random.default_rng(0).integers(len(scores), size=(1000, len(scores)))
        found = [rank_correlation(*pairs[:, draw].tolist()) for draw in draws]
        low, high = np.quantile(found, [0.05, 0.95])
        whole = rank_correlation(*pairs.tolist())
        lines.append(f"| {name} | {column} | {whole:.2f} | {low:.2f} to {high:.2f} |")
    return "".join(f"{line}\n" for line in [*lines, "", f"{len(scores)} methods."])
