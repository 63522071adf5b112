"""The report of a run that ended or failed. A separate process writes it, so that its failure fails no run.

Experiments (W&B, MLflow, …) get the report and the verdict too: their runs stay open until then.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verl_rc.config.errors import ConfigError
from verl_rc.config.folder_owner import FolderClaim, FolderLostError, FolderTakenError
from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.run_files import ENDING, REPORT
from verl_rc.metrics.sinks import ExperimentSink, FinalReport, Tracker
from verl_rc.trainer.log import log

_SECONDS = 60.0
"""Time that a page may take; a scheduler that ends a run waits about so long."""
_REASONS = {0: "all done", 130: "Ctrl-C", 143: "SIGTERM"}


@dataclass
class EndOfRun:
    """The part of a run that its end needs."""

    experiments: Mapping[str, ExperimentSink] = field(default_factory=dict)
    """Where the report is published, by name."""

    def close(self, tracker: Tracker) -> None:
        """Close the tracker's files, which the report reads; experiments are finished once they have the
        report."""
        self.experiments = tracker.experiments
        tracker.close_files()


@contextmanager
def report_at_end(trainer: TrainerConfig) -> Iterator[EndOfRun]:
    """Record how the run ended, and write ``report.html`` into its folder. Enter it first, so that all files
    are closed by then."""
    folder = Path(str(trainer.default_local_dir))
    with suppress(OSError):
        (folder / ENDING).unlink(missing_ok=True)  # of an earlier life
    end = EndOfRun()
    status, reason = 1, ""
    try:
        yield end
        status, reason = 0, _REASONS[0]
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        reason = _REASONS.get(status, "the process ended itself")
        raise
    except KeyboardInterrupt:
        status, reason = 130, _REASONS[130]
        raise
    except BaseException as error:
        status = 2 if isinstance(error, ConfigError) else 1
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise
    finally:
        verdict = None
        if trainer.report == "at_end" and folder.is_dir():
            with suppress(FolderTakenError, FolderLostError), FolderClaim(folder, "ending"):
                verdict = _write_report(folder, status, reason)
        for name, experiment in end.experiments.items():
            _publish(name, experiment, folder, verdict, trainer.wandb_text, status)


def _write_report(folder: Path, status: int, reason: str) -> dict[str, Any] | None:
    """Write the page and log its path and first lines, or why there is none; returns the verdict or None."""
    try:
        (folder / ENDING).write_text(
            json.dumps({"status": status, "reason": reason}) + "\n", encoding="utf-8"
        )
        report = _build_report(folder)
    except subprocess.TimeoutExpired:
        log("report: not written within %.0f s; verl-rc report %s writes it", _SECONDS, folder)
    except (OSError, _ReportError) as error:
        log("report: not written (%s)", error)
    except KeyboardInterrupt:
        log("report: not written; verl-rc report %s writes it", folder)
    else:
        verdict: dict[str, Any] = report["verdict"]
        for line in [*verdict["lines"], f"report: {report['report']}"]:
            log("%s", line)
        return verdict
    return None


class _ReportError(RuntimeError):
    """The process that writes a page failed; the message is its last line."""


def _build_report(folder: Path, *options: str) -> dict[str, Any]:
    """Write the page with ``verl-rc report --json``; returns its output."""
    report: dict[str, Any] = json.loads(_command("report", str(folder), "--json", *options))
    return report


def _command(*arguments: str) -> str:
    """Run ``verl-rc`` in another process, so that this one loads nothing of the insight package."""
    command = [sys.executable, "-m", "verl_rc.cli", *arguments]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if process.returncode != 0:
        lines = process.stderr.splitlines()
        raise _ReportError(lines[-1] if lines else f"exit code {process.returncode}")
    return process.stdout


def draw_curves(folder: Path) -> str:
    """Draw the training curves of the run in ``folder``; returns the file or the error."""
    try:
        return _command("plot", str(folder)).strip()
    except (OSError, _ReportError, subprocess.TimeoutExpired) as error:
        return f"not drawn ({error})"


def _publish(
    name: str,
    experiment: ExperimentSink,
    folder: Path,
    verdict: dict[str, Any] | None,
    with_text: bool,
    status: int,
) -> None:
    """Hand verdict and page over, if there are any, and finish the experiment. Prompts and responses go where
    it is asked for."""
    try:
        if verdict is not None:
            page = (folder / REPORT).read_text(encoding="utf-8") if with_text else _page_without_text(folder)
            experiment.publish(FinalReport("\n".join(verdict["lines"]), verdict["code"], page))
    except (
        OSError,
        RuntimeError,
        subprocess.TimeoutExpired,
    ) as error:  # a page or a network that fails must not fail the run
        log(
            "report: not handed to %s (%s: %s)",
            name,
            type(error).__name__,
            " ".join(str(error).split())[:200],
        )
    finally:
        experiment.finish(status)


def _page_without_text(folder: Path) -> str:
    with TemporaryDirectory() as place:
        page = Path(place) / REPORT
        _build_report(folder, "--no-text", "--output", str(page))
        return page.read_text(encoding="utf-8")
