"""Writing the page of runs to the disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from verl_rc.config.files import whole_or_absent
from verl_rc.insight.page.comparison import MOST_RUNS
from verl_rc.insight.page.page import build_page
from verl_rc.insight.run_folder import NothingToReadError, RunData, read_run
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.verdict import Verdict, judge
from verl_rc.metrics.run_files import REPORT


@dataclass(frozen=True)
class Request:
    """What ``verl-rc report`` was asked for."""

    paths: tuple[Path, ...]
    output: Path | None = None
    """The page's path; None: ``report.html`` in the folder of the run, or beside the log."""
    first_step: int = 0
    last_step: int = LARGEST_STEP
    newest_steps: int | None = None
    """Only so many steps up to the newest."""
    with_text: bool = True
    max_megabytes: float = 8.0
    """As ``build_page`` takes them."""


@dataclass(frozen=True)
class Report:
    """What was written."""

    path: Path
    runs: tuple[RunData, ...]
    verdicts: tuple[Verdict, ...]


def write_report(request: Request) -> Report:
    """Read the runs, judge them and write the page.

    Raises:
        NothingToReadError: a path holds no run, or the request contradicts itself.
        OSError: the page cannot be written.
    """
    if len(request.paths) > 1 and request.output is None:
        raise NothingToReadError("a report of several runs must have a place: pass --output FILE.")
    if len(request.paths) > MOST_RUNS:
        raise NothingToReadError(f"a report must compare at most {MOST_RUNS} runs, got {len(request.paths)}.")
    runs = tuple(_with_distinct_names([_read(path, request) for path in request.paths]))
    verdicts = tuple(judge(run) for run in runs)
    path = request.output or _default_path(request.paths[0])
    text = build_page(runs, verdicts, request.with_text, request.max_megabytes)
    with whole_or_absent(path) as file:
        file.write(text.encode("utf-8", "replace"))
    return Report(path, runs, verdicts)


def _read(path: Path, request: Request) -> RunData:
    run = read_run(path, request.first_step, request.last_step)
    if request.newest_steps is not None and len(run.steps) > request.newest_steps:
        run = read_run(path, run.steps[-request.newest_steps], request.last_step)
    return run


def _default_path(path: Path) -> Path:
    return path / REPORT if path.is_dir() else path.with_suffix(f".{REPORT}")


def _with_distinct_names(runs: Sequence[RunData]) -> list[RunData]:
    """Runs whose folders have one name get the name of the folder above as well, and a number if that does
    not help."""
    names = [run.name for run in runs]
    longer = [
        f"{run.path.resolve().parent.name}/{run.name}" if names.count(run.name) > 1 else run.name
        for run in runs
    ]
    numbered = [
        f"{name} ({index})" if longer.count(name) > 1 else name for index, name in enumerate(longer, start=1)
    ]
    return [replace(run, name=name) for run, name in zip(runs, numbered, strict=True)]
