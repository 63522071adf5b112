"""A method on a track with engines: its runs, and where it stands among those whose runs are kept."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from verl_rc.bench.standing import known_methods
from verl_rc.study.machine import versions
from verl_rc.study.runs import (
    ROOT,
    MixedResultsError,
    Run,
    known_runs,
    missing,
    read_runs,
    run_and_tell,
    the_same,
)
from verl_rc.study.standing import Score, Standing, require_same_start, scores
from verl_rc.study.tracks import CONTROL, SEEDS, TRACKS

KEPT = ROOT / "docs" / "bench"
"""Results of the project."""
STUDIES = ("controls", "quantised", "staleness")
"""Those of docs/evidence.md that have conditions of a track."""
RUNS = ROOT / "runs" / "evidence"
"""Where models, data and runs lie."""


def run_method(name: str, method: str, folder: Path, cores: Sequence[int | None]) -> Standing:
    """Run what is missing of a method on the track ``name``; results are lines of ``folder/NAME.jsonl``.

    Raises ``ValueError`` where there is no checkout of the project, which has the tasks, where the method
    cannot run, and where results of the same name were made otherwise.
    """
    if not (ROOT / "scripts" / "warm_start.sh").is_file():
        raise ValueError(f"the track {name} must run in a checkout of verl_rc; {ROOT} is none: clone it")
    study = TRACKS[name].study([method])
    results = folder / f"{name}.jsonl"
    track_files = [folder / f"{track}.jsonl" for track in TRACKS]
    for file in track_files:
        if other_versions := {run.versions for run in read_runs(file)} - {versions(), ""}:
            raise MixedResultsError(
                f"{file} must hold runs of the versions that are installed, {versions()}; it has runs of "
                f"{' and of '.join(sorted(other_versions))}: move it away, or install those"
            )
    known = known_runs(results, study)
    runs = {**the_same(study, [*_project_files(), *track_files]), **known}

    def require(run: Run) -> None:
        if control := runs.get((CONTROL, SEEDS[0])):
            require_same_start(run, control)

    for run in known.values():
        require(run)
    run_and_tell(study, missing(study, runs), RUNS, results, cores, require)
    methods, kept = all_runs(name, [results])
    standing = scores(TRACKS[name], dict.fromkeys([*methods, method]), {**runs, **kept})
    score_of = {score.method: score for score in standing}
    if method not in score_of:
        raise ValueError(
            f"{method} must have all its runs before it stands anywhere; those that were left out are still "
            "to be run: see above"
        )
    return Standing(name, score_of.pop(method), sorted(score_of.values(), key=lambda score: -score.mean))


def all_scores(name: str) -> Iterator[Score]:
    """Of every method whose runs on the track ``name`` are kept in the project."""
    return scores(TRACKS[name], *all_runs(name))


def all_runs(name: str, further: Sequence[Path] = ()) -> tuple[list[str], Mapping[tuple[str, int], Run]]:
    """Methods, and runs on the track ``name`` by arm and seed: of the project, and of ``further`` files."""
    files = [KEPT / f"{name}.jsonl", *further]
    kept_runs = {(run.arm, run.seed): run for file in files for run in read_runs(file)}
    methods = [method.name for method in known_methods()]
    kept_methods = (arm.partition(" ")[2] for arm, _ in kept_runs if arm != CONTROL)
    runs = {**the_same(TRACKS[name].study(methods), _project_files()), **kept_runs}
    return list(dict.fromkeys([*methods, *kept_methods])), runs


def _project_files() -> list[Path]:
    evidence = (ROOT / "docs" / "evidence" / f"{study}.jsonl" for study in STUDIES)
    return [*evidence, *(KEPT / f"{track}.jsonl" for track in TRACKS)]
