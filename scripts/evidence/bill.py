"""What corrections cost on recorded tokens, against what runs with them learned: does the bill predict the
outcome?

The bill is the error that ``verl-rc what-if`` estimates from the token records of a run of the study
``staleness``: the mean squared distance of a correction's update from that of exact row weights. The outcome
is the accuracy of the runs that used it.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from evidence.studies import CORRECTIONS
from numpy.typing import NDArray

from verl_rc.insight.run_folder import whole_records
from verl_rc.insight.what_if import NoRecordsError, read_batch, tried_configs, try_presets
from verl_rc.study.runs import Run, folder_of

STUDY = "staleness"
QUESTION = (
    "Does the error that verl-rc what-if estimates from recorded tokens predict which correction learns most?"
)
_IN_ACTOR = "bypass_ppo_clip"
"""Its records hold no log-probs of the trainer, so that nothing can be estimated from them."""


@dataclass(frozen=True)
class Bill:
    """The error of each correction, estimated from one run's records."""

    arm: str
    """Whose samples they are."""
    seed: int
    rows: int
    errors: dict[str, float]
    recommended: str | None

    @property
    def cell(self) -> str:
        """Age and learning rate, such as ``k4 lr1``."""
        k, _, rate = self.arm.split()
        return f"{k} {rate}"


def bills_of(folder: Path, runs: Mapping[tuple[str, int], Run]) -> Iterator[Bill]:
    """A bill for each run of the study whose folder still has its records."""
    configs = tried_configs(",".join(CORRECTIONS), [])
    for arm, seed in runs:
        if _IN_ACTOR in arm:
            continue
        try:
            batch = read_batch(folder_of(folder, arm, seed))
        except (NoRecordsError, OSError):
            continue
        result = try_presets(batch, configs)
        errors = {
            estimate.name: float(f"{estimate.columns['error'].value:.4g}") for estimate in result.estimates
        }
        yield Bill(arm, seed, len(batch.mask), errors, result.recommended)


def write_bills(path: Path, bills: Sequence[Bill]) -> None:
    """One line each, in place of an older one of the same run; others stay."""
    whole = {(bill.arm, bill.seed): bill for bill in (*read_bills(path), *bills)}
    path.write_text("".join(f"{json.dumps(asdict(bill))}\n" for bill in whole.values()), encoding="utf-8")


def read_bills(path: Path) -> list[Bill]:
    """What ``write_bills`` wrote; nothing without the file."""
    return [Bill(**record) for record in whole_records(path)]


def _ranks(sample: Sequence[float]) -> NDArray[np.float64]:
    _, places, counts = np.unique(sample, return_inverse=True, return_counts=True)
    ranks: NDArray[np.float64] = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: the correlation of ranks, of equal values the mean of theirs; 0 where one side is all
    equal."""
    ranks = np.array([_ranks(first), _ranks(second)])
    ranks -= ranks.mean(axis=1, keepdims=True)
    lengths = np.sqrt((ranks**2).sum(axis=1)).prod()
    return float(ranks[0] @ ranks[1] / lengths) if lengths else 0.0


def outcomes(runs: Mapping[tuple[str, int], Run]) -> dict[str, dict[str, float]]:
    """By cell and correction, the mean accuracy at the end over seeds."""
    scores: dict[str, dict[str, list[float]]] = {}
    for (arm, _), run in runs.items():
        k, correction, rate = arm.split()
        run_accuracies = run.accuracies
        scores.setdefault(f"{k} {rate}", {}).setdefault(correction, []).append(
            run_accuracies[-1] if run_accuracies else 0.0
        )
    return {
        cell: {name: mean(values) for name, values in cell_scores.items()}
        for cell, cell_scores in scores.items()
    }


def correlations(bills: Sequence[Bill], learned: Mapping[str, Mapping[str, float]]) -> list[float]:
    """Of each bill, the rank correlation of small errors and high accuracies over the corrections."""
    return [
        rank_correlation(
            [-bill.errors[name] for name in CORRECTIONS], [learned[bill.cell][name] for name in CORRECTIONS]
        )
        for bill in bills
    ]


def interval_of_mean(groups: Sequence[Sequence[float]], draws: int = 4000) -> tuple[float, float]:
    """90 % bootstrap interval of the mean of the groups' means: values of a group share what they are
    compared with."""
    samples = np.random.default_rng(0).choice([mean(group) for group in groups], size=(draws, len(groups)))
    low, high = np.quantile(samples.mean(axis=1), [0.05, 0.95])
    return float(low), float(high)


def section(bills: Sequence[Bill], runs: Mapping[tuple[str, int], Run]) -> list[str]:
    """The blocks of the page."""
    learned = outcomes(runs)
    titles = [f"{name}: error, accuracy" for name in CORRECTIONS]
    rows = [
        f"| samples | records | {' | '.join(titles)} | rank correlation | learned with the recommended one |"
    ]
    rows.append("|---" * (len(titles) + 4) + "|")
    for cell in sorted(learned, key=lambda cell: cell.split()[::-1]):  # by learning rate, then by age
        cell_bills = [bill for bill in bills if bill.cell == cell]
        if cell_bills:
            cells = [
                f"{median(bill.errors[name] for bill in cell_bills):.4f}, {learned[cell][name]:.3f}"
                for name in CORRECTIONS
            ]
            taken = mean(learned[cell][bill.recommended] for bill in cell_bills if bill.recommended)
            rho = mean(correlations(cell_bills, learned))
            rows.append(f"| {cell} | {len(cell_bills)} | {' | '.join(cells)} | {rho:.2f} | {taken:.3f} |")
    old = [bill for bill in bills if not bill.cell.startswith("k0 ")]
    by_cell = [
        correlations([old_bill for old_bill in old if old_bill.cell == cell], learned)
        for cell in dict.fromkeys(old_bill.cell for old_bill in old)
    ]
    low, high = interval_of_mean(by_cell)
    most = sum(
        learned[old_bill.cell][old_bill.recommended] == max(learned[old_bill.cell].values())
        for old_bill in old
        if old_bill.recommended
    )
    gained = mean(learned[bill.cell][bill.recommended] for bill in old if bill.recommended)
    without = mean(learned[bill.cell]["disabled"] for bill in old if bill.recommended)
    clip = mean(learned[bill.cell][_IN_ACTOR] for bill in old)
    summary = (
        f"Found: of {len(old)} runs with old samples the mean rank correlation is "
        f"{mean(map(mean, by_cell)):.2f} (90 % interval {low:.2f} to {high:.2f}, over ages and rates). What "
        f"was recommended for their records learned {gained:.3f} on average and the most in {most} of the "
        f"runs; no correction learned {without:.3f}, bypass mode's clip everywhere {clip:.3f}. The rule of "
        "the recommendation was chosen on these runs and on enumerated policies."
    )
    how = (
        "Run with `python -m scripts.evidence bill`, beside the run folders of `staleness` (two seconds for "
        f"each). A record has some {median(bill.rows for bill in bills):.0f} rows; runs whose records were "
        "not kept are missing."
    )
    prose = (QUESTION, "No expectation was written down before the estimates were seen.", summary, how)
    return ["## bill", *(textwrap.fill(paragraph, 100) for paragraph in prose), "\n".join(rows)]
