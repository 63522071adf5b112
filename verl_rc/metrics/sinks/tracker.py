"""All sinks of a run behind one object."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from verl_rc.config.errors import install_extra
from verl_rc.config.run import TrainerConfig
from verl_rc.metrics.sinks.local import AlertCause, Cell, ConsoleSink, ExperimentSink, JsonlSink, MetricSink

_MAX_NAMES = 1_000


class Tracker:
    """Forwards every call to all sinks."""

    def __init__(
        self,
        sinks: Sequence[MetricSink],
        experiment: ExperimentSink | None = None,
        run_id: str | None = None,
    ) -> None:
        """``experiment``: a further sink, which ``close_files`` keeps open for the report; None without
        one. ``run_id``: of an earlier life of the run, for a later one."""
        self._sinks = (*sinks, *(() if experiment is None else (experiment,)))
        self.experiment = experiment
        self.run_id = run_id if experiment is None else experiment.run_id
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
        """Close every sink but ``experiment``, which the caller must finish."""
        self._sinks = tuple(sink for sink in self._sinks if sink is not self.experiment)
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

    ``config`` (the resolved configuration) is for W&B, ``total_steps`` for the console. ``steps_done`` and
    ``run_id`` (of its ``Tracker``) are those of a resumed run, which continues the earlier output.

    Raises:
        ValueError: a sink needs a package that is not installed.
    """
    sinks: list[MetricSink] = [ConsoleSink(total_steps)] if "console" in trainer.logger else []
    if "tensorboard" in trainer.logger:
        sinks.append(_open_tensorboard(run_dir, steps_done))
    sinks.append(JsonlSink(run_dir, steps_done))
    if "wandb" not in trainer.logger:
        return Tracker(sinks, run_id=run_id)
    # Importing wandb takes seconds and writes to the home folder: only for those who asked for it.
    from verl_rc.metrics.sinks.wandb_sink import WandbSink  # noqa: PLC0415

    experiment = WandbSink(trainer.project_name, trainer.experiment_name, run_dir, config, run_id)
    return Tracker(sinks, experiment)


def _open_tensorboard(run_dir: Path, steps_done: int) -> MetricSink:
    try:
        from verl_rc.metrics.sinks.tensorboard_sink import TensorBoardSink  # noqa: PLC0415  (an optional package)
    except ImportError as error:
        raise ValueError(
            f"trainer.logger: 'tensorboard' must be installed to be used; {install_extra('tensorboard')}, or "
            "leave it out."
        ) from error
    return TensorBoardSink(run_dir, steps_done)
