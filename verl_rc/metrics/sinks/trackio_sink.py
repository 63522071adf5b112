"""A Trackio run, an optional extra; Trackio's own settings (``TRACKIO_DIR``, ``TRACKIO_SPACE_ID``) say where
it lies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import trackio

from verl_rc.metrics.sinks.local import AlertCause, Cell, ExperimentSink, FinalReport


class TrackioSink(ExperimentSink):
    """One run of a Trackio project."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_id: str | None = None,
    ) -> None:
        """``resume_id``: the ``run_id`` of the run that is continued. None starts a new run."""
        self._run = trackio.init(
            project=project_name,
            name=resume_id or experiment_name,
            config=dict(config),
            resume="never" if resume_id is None else "allow",
            embed=False,
        )
        self.run_id = str(self._run.name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Log a ``trackio.Table``."""
        table = trackio.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Send an alert, to webhooks too where ``TRACKIO_WEBHOOK_URL`` names one."""
        self._run.alert(title=title, text=f"step {step}\n{text}")

    def publish(self, report: FinalReport) -> None:
        """Keep the verdict as an alert; Trackio takes no page."""
        self._run.alert(title=report.code, text=report.verdict, level=trackio.AlertLevel.INFO)

    def finish(self, exit_status: int) -> None:
        """End the run; Trackio knows no failed ones."""
        self._run.finish()
