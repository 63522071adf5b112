"""Writing the page of a run to the disk."""

from dataclasses import dataclass
from pathlib import Path

from verl_rc.config.files import whole_or_absent
from verl_rc.insight.page.page import build_page
from verl_rc.insight.run_folder import RunData, read_run
from verl_rc.insight.run_folder.records import LARGEST_STEP
from verl_rc.insight.verdict import Verdict, verdict_of
from verl_rc.metrics.run_files import REPORT


@dataclass(frozen=True)
class ReportRequest:
    """The arguments of ``verl-rc report``."""

    path: Path
    output: Path | None = None
    """The page's path. None means ``report.html`` in the folder of the run, or beside the log."""
    first_step: int = 0
    last_step: int = LARGEST_STEP
    newest_steps: int | None = None
    """The number of newest steps that are read. None means all."""
    with_text: bool = True
    max_megabytes: float = 8.0
    """The largest size of the page, see ``build_page``."""


@dataclass(frozen=True)
class Report:
    """The page that was written, and what it shows."""

    path: Path
    run: RunData
    verdict: Verdict


def write_report(request: ReportRequest) -> Report:
    """Read the run, form its verdict and write the page.

    Raises:
        NothingToReadError: the path holds no run.
        OSError: the page cannot be written.
    """
    run = read_run(request.path, request.first_step, request.last_step)
    if request.newest_steps is not None and len(run.steps) > request.newest_steps:
        run = read_run(request.path, run.steps[-request.newest_steps], request.last_step)
    verdict = verdict_of(run)
    path = request.output or _default_path(request.path)
    text = build_page(run, verdict, request.with_text, request.max_megabytes)
    with whole_or_absent(path) as file:
        file.write(text.encode("utf-8", "replace"))
    return Report(path, run, verdict)


def _default_path(path: Path) -> Path:
    return path / REPORT if path.is_dir() else path.with_suffix(f".{REPORT}")
