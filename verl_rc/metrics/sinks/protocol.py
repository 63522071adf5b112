"""What every sink can do."""

from collections.abc import Mapping, Sequence
from typing import Protocol

Cell = str | int | float | bool | None
"""One cell of a table."""


class MetricSink(Protocol):
    """Shows or stores what a run reports. A sink ignores what it has no way to show."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Takes the reduced metrics of one step."""
        ...

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int) -> None:
        """Takes a table, such as validation samples; every row has one cell a column."""
        ...

    def log_histogram(self, name: str, edges: Sequence[float], counts: Sequence[float], step: int) -> None:
        """Takes a histogram: ``counts[i]`` values lie between ``edges[i]`` and ``edges[i + 1]``."""
        ...

    def alert(self, title: str, text: str, step: int) -> None:
        """Tells whoever watches that something is wrong; rarely called. ``text`` may have several lines."""
        ...

    def close(self) -> None:
        """Writes out what is pending; nothing may be logged afterwards."""
        ...
