"""A SwanLab run, an optional extra; SwanLab's own settings (``SWANLAB_MODE``, ``SWANLAB_API_KEY``,
``SWANLAB_LOG_DIR``) say where it lies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import swanlab

from verl_rc.metrics.sinks.local import AlertCause, Cell, ExperimentSink, FinalReport


class SwanlabSink(ExperimentSink):
    """One run of a SwanLab project; upload an offline one with ``swanlab sync``."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_id: str | None = None,
    ) -> None:
        """``resume_id``: the ``run_id`` of the run that is continued. None starts a new run."""
        try:
            self._run = swanlab.init(
                project=project_name,
                name=experiment_name,
                config=dict(config),
                id=resume_id,
                resume="never" if resume_id is None else "allow",
            )
        except (RuntimeError, OSError) as error:
            raise ValueError(
                f"trainer.logger: SwanLab must take the run, but: {str(error).rstrip('.')}. Set "
                "SWANLAB_API_KEY, or SWANLAB_MODE=offline and upload it later (swanlab sync), or leave "
                "'swanlab' out."
            ) from error
        self.run_id = str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Log a table."""
        table = swanlab.echarts.Table()
        table.add(list(columns), [list(row) for row in rows])
        self._run.log({name: table}, step=step)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Log the text below ``alerts``."""
        self._run.log({"alerts": swanlab.Text(f"{title}\n{text}")}, step=step)

    def publish(self, report: FinalReport) -> None:
        """Keep verdict and page."""
        self._run.log({"verdict": swanlab.Text(report.verdict), "report": swanlab.Html(report.page)})

    def finish(self, exit_status: int) -> None:
        """End the run, as crashed unless ``exit_status`` is 0."""
        error = f"exit status {exit_status}" if exit_status else None
        self._run.finish("crashed" if exit_status else "success", error=error)
