"""The table and the pictures of a study in docs/evidence.md, from its results.

Example: python -m scripts.research.evidence staleness k0 k8
The table goes to the console, and a picture of the arms whose names have one of the words to
docs/evidence/NAME_WORD.png.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from research.study import ROOT, Run, read_runs

from verl_rc.insight.picture import COLOURS, write_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS, PICTURES = ROOT / "scripts" / "research" / "results", ROOT / "docs" / "evidence"
PROMPTS = 256
"""Validation prompts of every task."""
MEANS: Mapping[str, str] = {
    "mean ESS": "rollout_corr/rollout_is_eff_sample_size",
    "mean gap (k3, nats)": "rollout_corr/k3_kl",
}
"""Columns of the table that are means over all steps of all runs of an arm."""


def area(run: Run) -> float:
    """Mean accuracy over the steps of a run, by the trapezoidal rule; steps that it did not reach count as
    0."""
    length = next(
        int(text.partition("=")[2])
        for text in run.overrides
        if text.startswith("trainer.total_training_steps=")
    )
    steps, values = np.array(run.accuracies, dtype=np.float64).reshape(-1, 2).T
    return float(np.trapezoid(values, steps)) / length


def interval(shares: Sequence[float], draws: int = 4000) -> tuple[float, float]:
    """90 % bootstrap interval of the mean of ``shares``: seeds are drawn with replacement, then the prompts
    of each."""
    rng = np.random.default_rng(0)
    seeds = rng.choice(np.asarray(shares), size=(draws, len(shares)))
    low, high = np.quantile(rng.binomial(PROMPTS, seeds).mean(axis=1) / PROMPTS, [0.05, 0.95])
    return float(low), float(high)


def table(runs_of_arm: Mapping[str, Sequence[Run]]) -> str:
    """A Markdown table with a row for each arm."""
    head = ["arm", "accuracy at the end, by seed", "mean", "90 % interval", "over the run", *MEANS]
    rows = [head, ["---"] * len(head)]
    for arm, runs in runs_of_arm.items():
        last = [run.accuracies[-1][1] for run in runs if run.accuracies]
        bounds = " to ".join(f"{bound:.3f}" for bound in interval(last)) if len(last) > 1 else "—"
        curves = ([value for run in runs for _, value in run.curves.get(name, [])] for name in MEANS.values())
        rows.append(
            [
                arm,
                ", ".join(f"{value:.3f}" for value in last),
                f"{np.mean(last):.3f}" if last else "—",
                bounds,
                ", ".join(f"{area(run):.3f}" for run in runs),
                *(f"{np.mean(values):.3g}" if values else "—" for values in curves),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(figure: "Figure", arms: Mapping[str, Sequence[Run]]) -> None:
    """Accuracy over steps: a line for each seed, a colour for each arm."""
    panel = figure.subplots()
    panel.set_title("Greedy accuracy on the validation prompts")
    panel.set_xlabel("training step")
    panel.set_ylabel("share of right answers")
    panel.set_ylim(0, 1.03)
    for place, (arm, runs) in enumerate(arms.items()):
        style = {
            "color": COLOURS[place % len(COLOURS)],
            "linestyle": ("-", "--", ":", "-.")[place // len(COLOURS) % 4],
        }
        for number, run in enumerate(runs):
            steps, values = zip(*(run.accuracies or [(0, 0.0)]), strict=True)
            panel.plot(steps, values, linewidth=1.2, label="_" if number else arm, **style)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def main() -> int:
    """Print the table and write the pictures of one study."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", help="of a file of results, without .jsonl; a path is taken, too")
    parser.add_argument("words", nargs="*", help="a picture for each of these words")
    options = parser.parse_args()
    path = Path(options.name) if options.name.endswith(".jsonl") else RESULTS / f"{options.name}.jsonl"
    runs_of_arm = dict[str, list[Run]]()
    for run in sorted(read_runs(path), key=lambda run: run.seed):
        runs_of_arm.setdefault(run.arm, []).append(run)
    if not runs_of_arm:
        print(f"{path} must hold the results of a study; it has no run.", file=sys.stderr)
        return 2
    print(table(runs_of_arm))
    for word in options.words:
        arms = {arm: runs for arm, runs in runs_of_arm.items() if word in arm.split()}
        write_picture(PICTURES / f"{path.stem}_{word}.png", (8.0, 4.4), partial(draw, arms=arms))
    return 0


if __name__ == "__main__":
    sys.exit(main())
