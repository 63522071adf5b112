"""An MLflow run, an optional extra; MLflow's own settings (``MLFLOW_TRACKING_URI``) say where it lies."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from verl_rc.config.schema import leaves_of
from verl_rc.metrics.sinks.local import AlertCause, Cell, ExperimentSink, FinalReport

_LOG = logging.getLogger("verl_rc")
_LONGEST, _MOST = 6000, 100
"""Characters of a parameter's value, and parameters of a call, that MLflow accepts."""


def mlflow_name(name: str) -> str:
    """``name`` as MLflow accepts it: verl writes ``@`` as ``_at_``, too."""
    return name.replace("@", "_at_")


class MlflowSink(ExperimentSink):
    """One run of the MLflow experiment that has the project's name."""

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
            self._client = MlflowClient()
            if resume_id is not None:
                self._client.update_run(resume_id, status="RUNNING")
                self.run_id = resume_id
                return
            experiment = self._client.get_experiment_by_name(project_name)
            place = (
                self._client.create_experiment(project_name)
                if experiment is None
                else experiment.experiment_id
            )
            self.run_id = str(self._client.create_run(place, run_name=experiment_name).info.run_id)
            values = [Param(mlflow_name(key), str(value)[:_LONGEST]) for key, value in leaves_of(config)]
            for start in range(0, len(values), _MOST):
                self._client.log_batch(self.run_id, params=values[start : start + _MOST])
        except MlflowException as error:
            raise ValueError(
                f"trainer.logger: MLflow must take the run, but: {str(error).rstrip('.')}. Set "
                "MLFLOW_TRACKING_URI, or leave 'mlflow' out."
            ) from error

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of one step; one that MLflow does not take is logged as a warning."""
        milliseconds = round(time.time() * 1000)
        with self._warns(f"step {step}"):
            self._client.log_batch(
                self.run_id,
                metrics=[
                    Metric(mlflow_name(name), value, milliseconds, step) for name, value in metrics.items()
                ],
            )

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Keep a table of this step."""
        with self._warns(name):
            table = {column: [row[place] for row in rows] for place, column in enumerate(columns)}
            self._client.log_table(self.run_id, table, f"{mlflow_name(name)}/{step}.json")

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Tag the run with its newest alert."""
        with self._warns("an alert"):
            self._client.set_tag(self.run_id, "alert", f"step {step}: {title}\n{text}")

    def publish(self, report: FinalReport) -> None:
        """Tag the run with the verdict and keep the page as ``report.html``."""
        try:
            self._client.set_tag(self.run_id, "verdict", report.verdict)
            self._client.set_tag(self.run_id, "verdict_code", report.code)
            self._client.log_text(self.run_id, report.page, "report.html")
        except MlflowException as error:
            raise RuntimeError(str(error)) from error

    def finish(self, exit_status: int) -> None:
        """End the run, as ``FAILED`` unless ``exit_status`` is 0."""
        with self._warns("the end of the run"):
            self._client.set_terminated(self.run_id, "FAILED" if exit_status else "FINISHED")

    @contextmanager
    def _warns(self, what: str) -> Iterator[None]:
        """What a server refuses, or does not answer to, ends no run."""
        try:
            yield
        except MlflowException as error:
            _LOG.warning("MLflow did not take %s: %s", what, " ".join(str(error).split())[:300])
