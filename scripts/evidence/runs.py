"""Running what a study lacks: one run after the other, each result kept as a line of a file."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from evidence.studies import ACCURACY, Study

from verl_rc.report.run_folder import whole_lines

ROOT = Path(__file__).resolve().parents[2]
CURVES = (
    ACCURACY,
    "critic/score/mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/k3_kl",
    "async/token_age/mean",
    "actor/grad_norm",
    "timing_s/step",
)
"""What is kept of a run."""
INTERRUPTED = (130, 143)
"""What the trainer returns when it is interrupted: no result of the arm."""
Start = Callable[[Sequence[str]], int]
"""Runs the trainer with overrides and returns its exit status."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and what came of it."""

    arm: str
    seed: int
    overrides: list[str]
    """Without the places of model, data and output."""
    exit_status: int
    """Of the trainer; what a run that failed wrote until then is kept."""
    seconds: float
    curves: dict[str, list[tuple[int, float]]]
    """Step and value, by metric."""


class MixedResultsError(ValueError):
    """Results on disk are those of another configuration."""


def known_runs(results: Path, study: Study) -> dict[tuple[str, int], Run]:
    """The runs in the file ``results``, by arm and seed.

    Raises ``MixedResultsError`` when one of them was run with other overrides than the study has now.
    """
    found = {}
    for _, line in whole_lines(results) if results.is_file() else ():
        run = Run(**json.loads(line))
        if run.arm in study.arms and run.overrides != overrides_of(study, run.arm, run.seed):
            now = set(overrides_of(study, run.arm, run.seed)) ^ set(run.overrides)
            raise MixedResultsError(
                f"{results} holds '{run.arm}', seed {run.seed}, run with other overrides than the study has now: "
                f"{', '.join(sorted(now))} differ. Move the file away to run the study anew, or take the change back."
            )
        found[run.arm, run.seed] = run
    return found


def overrides_of(study: Study, arm: str, seed: int) -> list[str]:
    """All that decides the numbers of a run."""
    return [*study.common, *study.arms[arm], f"trainer.seed={seed}"]


def missing(study: Study, known: dict[tuple[str, int], Run], words: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Arms whose names have all ``words``, and seeds, that are still to be run: all arms of a seed before the next seed."""
    arms = [arm for arm in study.arms if set(words) <= set(arm.split())]
    return [(arm, seed) for seed in study.seeds for arm in arms if (arm, seed) not in known]


def quick(study: Study, known: dict[tuple[str, int], Run]) -> list[tuple[str, int]]:
    """Of the first seed, the arms that show the sign of the effect, as far as they are still to be run."""
    return [(arm, study.seeds[0]) for arm in study.quick if (arm, study.seeds[0]) not in known]


def run_all(study: Study, todo: Sequence[tuple[str, int]], folder: Path, results: Path, start: Start) -> Iterator[Run]:
    """Run arms with seeds; every run is a line of ``results`` once it has ended. The trainer writes below ``folder``."""
    results.parent.mkdir(parents=True, exist_ok=True)
    for arm, seed in todo:
        place, overrides = folder / results.stem / f"{arm} seed{seed}".replace(" ", "_"), overrides_of(study, arm, seed)
        places = (
            *(f"actor_rollout_ref.model.path={folder / 'sft_model'}", f"trainer.default_local_dir={place}"),
            *(f"data.{split}_files={folder / 'data' / split}.parquet" for split in ("train", "val")),
            *("trainer.resume_mode=disable", "trainer.logger=[console]"),
        )
        began = time.time()
        status = start([*overrides, *places])
        if status in INTERRUPTED:
            raise KeyboardInterrupt
        run = Run(arm, seed, overrides, status, round(time.time() - began, 1), curves_of(place / "metrics.jsonl"))
        _append(results, json.dumps(asdict(run)))
        yield run


def curves_of(metrics: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each of ``CURVES`` that the file ``metrics.jsonl`` of a run has; nothing without the file."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for _, text in whole_lines(metrics) if metrics.is_file() else ():
        line = json.loads(text)
        for name in CURVES:
            if isinstance(line.get(name), int | float):
                curves.setdefault(name, []).append((line["step"], float(f"{line[name]:.5g}")))
    return curves


def _append(results: Path, line: str) -> None:
    """Add a line, in place of half a line that an interruption may have left."""
    whole = "".join(text for _, text in whole_lines(results)) if results.is_file() else ""
    results.write_text(f"{whole}{line}\n", encoding="utf-8")


def start_trainer(overrides: Sequence[str]) -> int:
    """Run the trainer in a process of its own; its output goes to a file beside its metrics."""
    place = Path(next(given for given in overrides if given.startswith("trainer.default_local_dir=")).partition("=")[2])
    return run_in(place, "verl_rc.main_ppo", *overrides)


def run_in(place: Path, module: str, *arguments: str) -> int:
    """Run ``python -m module`` with its output in ``output.log`` of a folder; returns its exit status."""
    place.mkdir(parents=True, exist_ok=True)
    with (place / "output.log").open("w", encoding="utf-8") as output:
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False).returncode


def prepare(folder: Path) -> None:
    """Make the task and the model that all runs start from, once."""
    if (folder / "sft_model" / "config.json").is_file():
        return
    fixed = {"RUN_ROOT": str(folder.resolve()), "SEED": "1", "NUM_HEADS": "4", "PYTHON": sys.executable}
    inherited = {name: value for name, value in os.environ.items() if name not in ("DATA_DIR", "MODEL_PATH")}
    subprocess.run(["bash", "scripts/warm_start.sh"], cwd=ROOT, env={**inherited, **fixed}, check=True)
