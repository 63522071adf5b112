"""Running what a study lacks: one run on each of some cores at a time, each result kept as a line of a
file."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock

from verl_rc.bench.results import commit
from verl_rc.config.folder_owner import FolderClaim
from verl_rc.insight.run_folder import whole_lines, whole_records
from verl_rc.study.machine import described, refused, versions
from verl_rc.study.study import ACCURACY, QUICKSTART, Study, Task

ROOT = Path(__file__).resolve().parents[2]
CURVES = (
    ACCURACY,
    "critic/score/mean",
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/k3_kl",
    "async/token_age/mean",
    "actor/grad_norm",
    "actor/grad_cosine",
    "actor/entropy",
    "actor/pg_clipfrac",
    "actor/flipped_experts",
    "sync/update_survival",
    "sync/changed_weights",
    "timing_s/step",
)
"""What is kept of a run."""
INTERRUPTED = (130, 143)
"""What the trainer returns when it is interrupted: no result of the arm."""
Start = Callable[[Sequence[str], str, int | None], int]
"""Runs the trainer with overrides and what is planted, if anything, on one core (None: all); returns its exit
status."""


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
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of the study's task."""
    planted: str = ""
    """What the workers did wrong."""
    code: str = ""
    """A hash of the user's own file that was run; empty: none."""
    machine: str = ""
    """That it ran on; empty: not recorded."""
    versions: str = ""
    """Of the packages that compute; empty: not recorded."""
    commit: str = ""
    """Of the checkout; empty: not recorded."""

    @property
    def accuracies(self) -> list[float]:
        """Of the validations, in the order of the steps; empty for a run that failed before its first one."""
        return [value for _, value in self.curves.get(ACCURACY, [])]

    @property
    def made_by(self) -> set[str]:
        """All that decides the numbers."""
        settings = {**self.settings, "PLANTED_FAULT": self.planted, "hash of the user's file": self.code}
        return {*self.overrides, *(f"{name}={value}" for name, value in settings.items() if value)}


class MixedResultsError(ValueError):
    """Results on disk are those of another configuration."""


class NotStartedError(RuntimeError):
    """A run ended before its first step, which says nothing of its arm."""


def known_runs(results: Path, study: Study) -> dict[tuple[str, int], Run]:
    """The runs in the file ``results``, by arm and seed.

    Raises ``MixedResultsError`` when one of them was made otherwise than the study would make it now.
    """
    runs = {}
    for run in read_runs(results):
        if run.arm in study.arms and run.made_by != (plan := planned(study, run.arm, run.seed).made_by):
            differences = plan ^ run.made_by
            raise MixedResultsError(
                f"{results} holds '{run.arm}', seed {run.seed}, run otherwise than the study would now: "
                f"{', '.join(sorted(differences))} differ. Move the file away to run the study anew, or take "
                "the change back."
            )
        runs[run.arm, run.seed] = run
    return runs


def read_runs(results: Path) -> Iterator[Run]:
    """Every run in the file ``results``; none where there is no file."""
    for record in whole_records(results):
        yield Run(**record)


def the_same(study: Study, files: Iterable[Path]) -> dict[tuple[str, int], Run]:
    """Runs of other studies that were made as those of ``study``, by its arms and seeds."""
    runs = {frozenset(run.made_by): run for file in files for run in read_runs(file)}
    plans = {(arm, seed): planned(study, arm, seed) for arm in study.arms for seed in study.seeds}
    return {
        key: runs[frozenset(plan.made_by)] for key, plan in plans.items() if frozenset(plan.made_by) in runs
    }


def planned(study: Study, arm: str, seed: int) -> Run:
    """A run of a study before it is run: what decides its numbers, and no result."""
    overrides = [*study.common, *study.arms[arm], f"trainer.seed={seed}"]
    planted, code = study.planted.get(arm, ""), study.code.get(arm, "")
    return Run(arm, seed, overrides, 0, 0.0, {}, dict(study.task.settings), planted, code)


def missing(
    study: Study, known: dict[tuple[str, int], Run], words: Sequence[str] = ()
) -> list[tuple[str, int]]:
    """Arms whose names have all ``words``, and seeds, that are still to be run: all arms of a seed before the
    next seed."""
    arms = [arm for arm in study.arms if set(words) <= set(arm.split())]
    return [(arm, seed) for seed in study.seeds for arm in arms if (arm, seed) not in known]


def folder_of(base: Path, arm: str, seed: int) -> Path:
    """Where a run lies; the name of its folder needs no quotes in Hydra's grammar."""
    return base / re.sub(r"[^\w.+-]", "_", f"{arm} seed{seed}")


def run_all(
    study: Study,
    todo: Sequence[tuple[str, int]],
    folder: Path,
    results: Path,
    start: Start,
    cores: Sequence[int | None] = (None,),
    require: Callable[[Run], None] = lambda run: None,
) -> Iterator[Run]:
    """Run arms with seeds, one on each of ``cores`` at a time (None: a run on all of them).

    Every run is a line of ``results`` once it has ended, and is then given to ``require``; where that raises,
    no further run begins. The trainer writes below ``folder``, where a study runs once at a time. Raises
    ``NotStartedError`` and ``FolderTakenError``.
    """
    results.parent.mkdir(parents=True, exist_ok=True)
    free, writing = list(cores), Lock()

    def run(arm: str, seed: int) -> Run:
        try:
            finished_run = run_one(arm, seed)
            with writing:  # here, so that another run that fails, or an interrupt, does not lose this one
                _append(results, json.dumps(asdict(finished_run)))
            require(finished_run)
        except BaseException:
            with writing:  # when all are submitted, and before this thread takes the next one
                pool.shutdown(wait=False, cancel_futures=True)
            raise
        return finished_run

    def run_one(arm: str, seed: int) -> Run:
        place, plan = folder_of(folder / results.stem, arm, seed), planned(study, arm, seed)
        begin = folder / study.task.folder
        places = (
            *(f"actor_rollout_ref.model.path={begin / 'sft_model'}", f"trainer.default_local_dir={place}"),
            *(f"data.{split}_files={begin / 'data' / split}.parquet" for split in ("train", "val")),
            *("trainer.resume_mode=disable", "trainer.logger=[console]"),
        )
        began, core = time.time(), free.pop()
        try:
            status = start([*plan.overrides, *places], plan.planted, core)
        finally:
            free.append(core)
        if status in INTERRUPTED:
            raise KeyboardInterrupt
        seconds, curves = round(time.time() - began, 1), curves_of(place / "metrics.jsonl", study.every)
        if status and not curves:
            raise NotStartedError(
                f"{arm}, seed {seed}, ended before its first step; see {place / 'output.log'}"
            )
        return replace(
            plan,
            exit_status=status,
            seconds=seconds,
            curves=curves,
            machine=described(core),
            versions=versions(),
            commit=commit() or "",
        )

    with FolderClaim(folder / results.stem, "study"), ThreadPoolExecutor(len(cores)) as pool:
        try:
            with writing:
                futures = [pool.submit(run, arm, seed) for arm, seed in todo]
            for finished_run in as_completed(futures):
                yield finished_run.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run_and_tell(
    study: Study,
    todo: Sequence[tuple[str, int]],
    folder: Path,
    results: Path,
    cores: Sequence[int | None],
    require: Callable[[Run], None] = lambda run: None,
) -> None:
    """Run arms with seeds that this machine can run, and say on stderr what came of each; see ``run_all``."""
    impossible = refused(study, dict.fromkeys(arm for arm, _ in todo), on_one_core=[*cores] != [None])
    todo = [(arm, seed) for arm, seed in todo if arm not in impossible]
    for reason in sorted(set(impossible.values())):
        _tell(f"{list(impossible.values()).count(reason)} arms are left out: {reason}")
    minutes = len(todo) * study.minutes / len(cores)
    _tell(f"{len(todo)} runs, some {minutes:.0f} minutes on idle cores")
    if todo:
        prepare(folder, study.task)
    for run in run_all(study, todo, folder, results, start_trainer, cores, require):
        accuracy = run.accuracies or [float("nan")]
        _tell(f"{run.arm}, seed {run.seed}: {accuracy[0]:.3f} to {accuracy[-1]:.3f}, {run.seconds:.0f} s")


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def curves_of(metrics: Path, interval: int = 1) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each of ``CURVES`` that the file ``metrics.jsonl`` of a run has, one of ``interval``
    steps; nothing without the file."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for line in whole_records(metrics):
        for name in CURVES:
            if line["step"] % interval == 0 and isinstance(line.get(name), int | float):
                curves.setdefault(name, []).append((line["step"], float(f"{line[name]:.5g}")))
    return curves


def _append(results: Path, line: str) -> None:
    """Add a line, in place of half a line that an interruption may have left."""
    lines = "".join(text for _, text in whole_lines(results)) if results.is_file() else ""
    results.write_text(f"{lines}{line}\n", encoding="utf-8")


def start_trainer(overrides: Sequence[str], planted: str, core: int | None = None) -> int:
    """Run the trainer, with a fault where one is planted, in a process of its own; its output goes beside its
    metrics."""
    place = Path(
        next(
            override for override in overrides if override.startswith("trainer.default_local_dir=")
        ).partition("=")[2]
    )
    if planted:
        return run_in(place, "scripts.planted_faults.start", planted, "--", *overrides, core=core)
    return run_in(place, "verl_rc.main_ppo", *overrides, core=core)


def run_in(place: Path, module: str, *arguments: str, core: int | None = None) -> int:
    """Run ``python -m module`` on one core (None: all), its output in ``output.log`` of a folder; returns its
    exit status."""
    place.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", module, *arguments]
    with (place / "output.log").open("w", encoding="utf-8") as output, _kept_on(core) as environment:
        # Functions of the user's own lie where the user is.
        python_path = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": python_path, **environment}
        return subprocess.run(
            command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode


@contextmanager
def _kept_on(core: int | None) -> Iterator[dict[str, str]]:
    """Keep this thread, and what it starts, on one core; yields the environment that gives it its own Ray.
    None: no change."""
    if core is None:
        yield {}
        return
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        # Two Ray clusters on one machine find each other by their temporary folder, whose path has to be
        # short.
        with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
            yield {"RAY_TMPDIR": folder}
    finally:
        os.sched_setaffinity(0, affinity)


def prepare(folder: Path, task: Task = QUICKSTART) -> None:
    """Make the problems and the model that all runs of a study start from, once."""
    begin = folder / task.folder
    made_by = begin / "settings.json"
    if (begin / "sft_model" / "config.json").is_file():
        if task.settings != (json.loads(made_by.read_text(encoding="utf-8")) if made_by.is_file() else {}):
            raise MixedResultsError(
                f"{begin} holds a task and a model made with other settings: move it away."
            )
        return
    fixed = {
        "RUN_ROOT": str(begin.resolve()),
        "SEED": "1",
        "NUM_HEADS": "4",
        "PYTHON": sys.executable,
        **task.settings,
    }
    variables = ("DATA_DIR", "MODEL_PATH", "DIGITS_OPTIONS", "SFT_OPTIONS")
    inherited = {name: value for name, value in os.environ.items() if name not in variables}
    subprocess.run(["bash", "scripts/warm_start.sh"], cwd=ROOT, env={**inherited, **fixed}, check=True)
    made_by.write_text(json.dumps(dict(task.settings)) + "\n", encoding="utf-8")
