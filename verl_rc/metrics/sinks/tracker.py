"""All sinks of a run behind one object."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_rc.config.errors import ConfigError, install_extra
from verl_rc.config.run import EXPERIMENTS, TrainerConfig
from verl_rc.metrics.sinks.local import AlertCause, Cell, ConsoleSink, ExperimentSink, JsonlSink, MetricSink

_MAX_NAMES = 1_000
_OPTIONAL = ("tensorboard", "mlflow", "swanlab", "trackio")
"""Packages that are extras of the same name."""


def require_installed(loggers: Sequence[str]) -> None:
    """Raise ``ConfigError`` for the sinks of ``trainer.logger`` whose package is not installed."""
    missing = [name for name in loggers if name in _OPTIONAL and find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"trainer.logger: {', '.join(missing)} must be installed to be used; "
            f"{install_extra(','.join(missing))}, or leave it out."
        )


class Tracker:
    """Forwards every call to all sinks."""

    def __init__(
        self,
        sinks: Sequence[MetricSink],
        experiments: Mapping[str, ExperimentSink] | None = None,
        run_id: str | None = None,
    ) -> None:
        """``experiments``: further sinks by name, which ``close_files`` keeps open for the report.
        ``run_id``: W&B's of an earlier life of the run, for a later one."""
        self.experiments = dict(experiments or {})
        self._sinks = (*sinks, *self.experiments.values())
        self.run_id = self.experiments["wandb"].run_id if "wandb" in self.experiments else run_id
        """The W&B run id, stored in checkpoints; None in a run that had no W&B yet."""
        self._names: set[str] = set()
        """Names of metrics of environments that the sinks have got."""
        self.last_alert: int | None = None
        """The step of the newest alert of this process."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the reduced metrics of one step. Of environments, whose names may be others in every step,
        those with the first thousand names; ``env/names_dropped/max`` counts the others."""
        new_names = [name for name in metrics if "/env/" in f"/{name}" and name not in self._names]
        room = _MAX_NAMES - len(self._names)
        self._names.update(new_names[:room])
        if dropped := set(new_names[room:]):
            shown = {name: value for name, value in metrics.items() if name not in dropped}
            metrics = {**shown, "env/names_dropped/max": float(len(dropped))}
        for sink in self._sinks:
            sink.log(metrics, step)

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Send an alert to the user."""
        self.last_alert = step
        for sink in self._sinks:
            sink.alert(title, text, step, cause)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Take a table, such as validation samples; every row has one cell a column."""
        for sink in self._sinks:
            sink.log_table(name, columns, rows, step)

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Take a histogram: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""
        for sink in self._sinks:
            sink.log_histogram(name, edges, counts, step)

    def close(self) -> None:
        """Close every sink, also when one of them fails."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def close_files(self) -> None:
        """Close every sink but ``experiments``, which the caller must finish."""
        self._sinks = tuple(sink for sink in self._sinks if sink not in self.experiments.values())
        self.close()


def open_tracker(
    trainer: TrainerConfig,
    run_dir: Path,
    config: Mapping[str, Any],
    total_steps: int,
    *,
    steps_done: int = 0,
    run_id: str | None = None,
) -> Tracker:
    """Open JSON lines and the sinks of ``trainer.logger``.

    ``config`` (the resolved configuration) is for experiments, ``total_steps`` for the console.
    ``steps_done`` and ``run_id`` (of its ``Tracker``) are those of a resumed run, which continues the earlier
    output; the ids of experiments other than W&B's lie in the run's folder.

    Raises:
        ValueError: a sink needs a package that is not installed, or does not take the run.
    """
    require_installed(trainer.logger)
    sinks: list[MetricSink] = [ConsoleSink(total_steps)] if "console" in trainer.logger else []
    if "tensorboard" in trainer.logger:
        sinks.append(_class_of("tensorboard", "TensorBoardSink")(run_dir, steps_done))
    sinks.append(JsonlSink(run_dir, steps_done))
    experiments: dict[str, ExperimentSink] = {}
    for name in [name for name in EXPERIMENTS if name in trainer.logger]:
        kept = run_dir / f"{name}_run_id"
        earlier = kept.read_text(encoding="utf-8") if steps_done and kept.exists() else None
        arguments = trainer.project_name, trainer.experiment_name, run_dir, config
        sink = _class_of(name, f"{name.capitalize()}Sink")
        experiments[name] = sink(*arguments, run_id if name == "wandb" else earlier)
        if name != "wandb":  # W&B's id is in the checkpoint
            kept.write_text(experiments[name].run_id, encoding="utf-8")
    return Tracker(sinks, experiments, run_id)


def _class_of(name: str, sink: str) -> Any:
    """Only here is the package ``name`` imported: that takes seconds, and W&B writes to the home folder."""
    return getattr(import_module(f"verl_rc.metrics.sinks.{name}_sink"), sink)
