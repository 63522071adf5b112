"""TensorBoard event files, an optional extra."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch.utils.tensorboard as torch_tensorboard

from verl_rc.metrics.sinks.local import AlertCause, Cell, MetricSink


class TensorBoardSink(MetricSink):
    """Writes to ``<run_dir>/tensorboard``."""

    def __init__(self, run_dir: Path, steps_done: int = 0) -> None:
        """Open the event file; TensorBoard hides earlier entries of steps after ``steps_done``."""
        purged = steps_done + 1 if steps_done > 0 else None
        self._writer = torch_tensorboard.SummaryWriter(str(run_dir / "tensorboard"), purge_step=purged)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write one scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Write a Markdown table as text."""
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(
            name, "\n".join("| " + " | ".join(map(_markdown, line)) + " |" for line in lines), step
        )

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Write a histogram; sums are taken at bin centres, since the values themselves are gone."""
        centres = [(low + high) / 2 for low, high in pairwise(edges)]
        pairs = list(zip(centres, counts, strict=True))
        self._writer.add_histogram_raw(
            name,
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=sum(centre * count for centre, count in pairs),
            sum_squares=sum(centre**2 * count for centre, count in pairs),
            bucket_limits=list(edges[1:]),
            bucket_counts=list(counts),
            global_step=step,
        )

    def alert(self, title: str, text: str, step: int, cause: AlertCause | None = None) -> None:
        """Write the text below ``alerts``."""
        self._writer.add_text("alerts", f"**{_markdown(title)}**<br>{_markdown(text)}", step)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def _markdown(cell: Cell) -> str:
    return str(cell).replace("|", "\\|").replace("\n", "<br>")
