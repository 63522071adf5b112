"""How often healthy steps in the files of other trainers, and those of recorded runs, are called ill.

Usage: python -m scripts.planted_faults.false_alarms_in_files --out FILE [--seeds 3 | --runs PART FOLDER ...]
Steps are sampled from policies over few tokens, whose distributions are known, in three precisions, two
temperatures and two degrees of certainty; each is written as one of five trainers writes it and read by our
reader, and judged with more and with fewer fields, too. FILE gets a line of counts for each run, and a
repeated call goes on behind the last. ``false_alarms --sum`` adds lines up.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from planted_faults.alarm_counts import PARTS, counted
from planted_faults.false_alarms import LACKING, metrics_without, run_of
from planted_faults.foreign_layouts import WRITERS
from planted_faults.planted_tokens import Planted, Row, rows_of

from verl_rc.data.token_rows import record_of_rows
from verl_rc.insight.run_folder import RunData, read_run

NOISES = {"float32": 1e-6, "bfloat16": 0.03, "fp8 weights": 0.09}
"""Of the engine's logits."""
PROMPTS = 8
"""Of a step, six samples each: what is counted in errors is harder to judge in small batches."""
TEMPERATURES = (1.0, 0.6)
"""On both sides."""
SHARPEST = (0.3, 2.0)
"""Logarithm of the largest standard deviation of logits: policies that are certain of few tokens or of
many."""
STEPS = {"prime-rl": 100, "NeMo-RL": 100, "SkyRL": 100, "slime": 25, "miles": 25}
"""Of a run; fewer where a dump is many small tensors, which take long to read."""


@dataclass(frozen=True)
class Simulated:
    """A healthy run of another trainer."""

    trainer: str
    precision: str
    temperature: float
    sharpest: float
    seed: int

    def steps(self) -> Iterator[tuple[int, list[Row]]]:
        """The rows of each step."""
        plan = Planted(NOISES[self.precision], self.temperature, sharpest=self.sharpest)
        number = crc32(repr(self).encode())  # other samples in every run
        for step in range(1, STEPS[self.trainer] + 1):
            yield step, rows_of(plan, number, step, PROMPTS)

    def readings(self, folder: Path) -> Iterator[RunData]:
        """Its steps as its files hold them, and with our fields or fewer."""
        records = []
        for step, rows in self.steps():
            WRITERS[self.trainer](folder, step, rows)
            records.append(record_of_rows({"temperature": self.temperature}, step, rows))
        # SkyRL's engine reports raw log-probs: at another temperature these steps would be its row 4.
        if self.trainer != "SkyRL" or self.temperature == 1.0:
            yield read_run(folder)
        for without in LACKING.values():
            yield run_of(metrics_without(records, without))


def simulated(seeds: int) -> list[Simulated]:
    """Every run of the study."""
    settings = product(range(seeds), NOISES, TEMPERATURES, SHARPEST, STEPS)
    return [Simulated(trainer, *setting, seed) for seed, *setting, trainer in settings]


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate or read what is not in the file yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--part", choices=PARTS[:2], default=PARTS[0])
    parser.add_argument("--runs", type=Path, nargs="*", default=[], help="folders of healthy runs")
    options = parser.parse_args(arguments)
    options.out.touch()
    done = {json.loads(line)["run"] for line in options.out.read_text("utf-8").splitlines()}

    def write(run: str, part: str, readings: Iterator[RunData]) -> None:
        line = {"run": run, "part": part, "counts": counted(readings).as_json()}
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    for run in simulated(options.seeds):
        if str(run) not in done:
            with tempfile.TemporaryDirectory() as folder:
                write(str(run), PARTS[3], run.readings(Path(folder)))
    for folder in options.runs:
        if str(folder) not in done:
            write(str(folder), options.part, iter([read_run(folder)]))


if __name__ == "__main__":
    main()
