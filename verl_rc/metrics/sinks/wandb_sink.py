"""Weights & Biases; offline when nobody is logged in."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from verl_rc.config.checks import why_unwritable
from verl_rc.metrics.sinks.local import Cell
from verl_rc.metrics.sinks.tags import run_tags

_HEADLINE_PREFIX = "val-core/"
_BEST_PREFIX = "best/"


class WandbSink:
    """One W&B run. Its files lie in ``<run_dir>/wandb``; upload an offline run with ``wandb sync``."""

    def __init__(
        self,
        project_name: str,
        experiment_name: str,
        run_dir: Path,
        config: Mapping[str, Any],
        resume_id: str | None = None,
    ) -> None:
        """``resume_id``: the ``run_id`` of the run that is continued; None starts a new one."""
        run_dir.mkdir(parents=True, exist_ok=True)
        find_own_folders(run_dir)
        self._run = wandb.init(
            project=project_name,
            name=experiment_name,
            dir=str(run_dir),
            config=dict(config),
            tags=run_tags(config),
            id=resume_id,
            resume=None if resume_id is None else "allow",
            mode=_mode(),
            settings=wandb.Settings(console="off", quiet=True),
        )

    @property
    def run_id(self) -> str:
        """What a checkpoint keeps so that a resumed run continues this one."""
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of one step; the summary keeps the best of every headline of validation, and the step it came from."""
        self._run.log(dict(metrics), step=step)
        for name, value in metrics.items():
            if name.startswith(_HEADLINE_PREFIX):
                self._keep_best(name.removeprefix(_HEADLINE_PREFIX), value, step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Logs a ``wandb.Table``."""
        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Logs a ``wandb.Histogram``, which holds at most 512 bins: neighbours are joined where there are more."""
        edges, counts = join_bins(edges, counts, max_bins=512)
        self._run.log({name: wandb.Histogram(np_histogram=(list(counts), list(edges)))}, step=step)

    def alert(self, title: str, text: str, step: int) -> None:
        """Sends an alert, by mail or Slack as the user's settings at W&B say; an offline run's when it is uploaded."""
        self._run.alert(title=title, text=f"step {step}\n{text}", level=wandb.AlertLevel.WARN)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()

    def _keep_best(self, name: str, value: float, step: int) -> None:
        """A resumed run that is online goes on from the best so far; the first of equal values counts."""
        best = self._run.summary.get(f"{_BEST_PREFIX}{name}")
        if best is None or value > best:
            self._run.summary.update({f"{_BEST_PREFIX}{name}": value, f"{_BEST_PREFIX}{name}/step": step})


def join_bins(edges: Sequence[float], counts: Sequence[float], max_bins: int) -> tuple[list[float], list[float]]:
    """Joins equally many neighbouring bins so that at most ``max_bins`` remain; counts add up."""
    width = -(-len(counts) // max_bins)
    starts = range(0, len(counts), width)
    return [edges[i] for i in starts] + [edges[-1]], [sum(counts[i : i + width]) for i in starts]


def find_own_folders(run_dir: Path) -> None:
    """W&B keeps logs and copies of tables below the home folder; where it cannot write there, it does in the run's folder.

    Without, it fills the console with errors, and the first table ends the run.
    """
    own = {wandb.env.CACHE_DIR: wandb.env.get_cache_dir(), wandb.env.DATA_DIR: wandb.env.get_data_dir()}
    for variable, folder in own.items():
        if why_unwritable(Path(folder)) is not None:
            os.environ[variable] = str(run_dir.absolute() / "wandb" / variable.lower())


def _mode() -> Any:
    """What the user set in ``WANDB_MODE`` (None: wandb reads it), or offline when there are no credentials."""
    if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False):
        return None
    return "offline"
