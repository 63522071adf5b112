"""Weights & Biases; offline when nobody is logged in."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb

from verl_rc.metrics.sinks.protocol import Cell


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
        self._run = wandb.init(
            project=project_name,
            name=experiment_name,
            dir=str(run_dir),
            config=dict(config),
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
        """Logs the metrics of one step."""
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Logs a ``wandb.Table``."""
        self._run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])}, step=step)

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Logs a ``wandb.Histogram``, which holds at most 512 bins: neighbours are joined where there are more."""
        edges, counts = join_bins(edges, counts, max_bins=512)
        self._run.log({name: wandb.Histogram(np_histogram=(list(counts), list(edges)))}, step=step)

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()


def join_bins(edges: Sequence[float], counts: Sequence[float], max_bins: int) -> tuple[list[float], list[float]]:
    """Joins equally many neighbouring bins so that at most ``max_bins`` remain; counts add up."""
    width = -(-len(counts) // max_bins)
    starts = range(0, len(counts), width)
    return [edges[i] for i in starts] + [edges[-1]], [sum(counts[i : i + width]) for i in starts]


def _mode() -> Any:
    """What the user set in ``WANDB_MODE`` (None: wandb reads it), or offline when there are no credentials."""
    if os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False):
        return None
    return "offline"
