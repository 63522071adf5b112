"""Records of a run that every reader fills and every panel of the report reads."""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl_rc.insight.run_folder.token_data import TokenData

LARGEST_STEP = 2**24
"""Steps above it are no steps of a run, and no whole numbers in float32, in which the page keeps them."""

LARGEST_VALUE = 1e37
"""Values beyond it count as infinite: they do not fit into float32, and their squares not into a sum."""


def is_usable(value: float) -> bool:
    """Whether a value can be drawn and averaged; False for NaN."""
    return abs(value) <= LARGEST_VALUE


class NothingToReadError(ValueError):
    """The path holds no run and no known log; the message lists the files that were looked for."""


@dataclass(frozen=True)
class Series:
    """One metric: its value at each step that logged it, steps ascending."""

    steps: Sequence[int]
    values: Sequence[float]

    @classmethod
    def from_steps(cls, values: Mapping[int, float]) -> "Series":
        """The series of a value for each step, steps ascending."""
        return cls(list(values), list(values.values()))

    def __len__(self) -> int:
        return len(self.steps)

    def finite(self) -> "Series":
        """The steps at which the value is a finite number."""
        return Series.from_steps({step: value for step, value in self.by_step().items() if is_usable(value)})

    def between(self, first: int, last: int) -> "Series":
        """The steps from ``first`` to ``last``, both included."""
        low, high = bisect_left(self.steps, first), bisect_left(self.steps, last + 1)
        return Series(self.steps[low:high], self.values[low:high])

    def by_step(self) -> dict[int, float]:
        """The value of each step."""
        return dict(zip(self.steps, self.values, strict=True))


NO_SERIES = Series((), ())


@dataclass
class _Column:
    steps: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    restarts: int = 0
    """The number of restarts in the log when the column was touched last."""


class Columns:
    """Metrics by name, collected step by step; a step that comes twice counts once.

    Lines of the same step are one step, later values win. A step that lies before the one read last begins a
    later life of a resumed run: what the earlier life logged from that step on is dropped, as the run itself
    dropped it.
    """

    def __init__(self, rows: Iterable[tuple[int, Mapping[str, float]]] = ()) -> None:
        """``rows``: steps and metrics to begin with."""
        self.steps = array("q")
        self.repeated = 0
        """Lines whose step was there already."""
        self.restarts: list[tuple[int, int]] = []
        """(first step of the later life, last step of the life before it)."""
        self._columns: dict[str, _Column] = {}
        self._cuts: list[tuple[int, int]] = []
        """The restarts that reach farther back than all later ones, each as number and first step. A column
        is cut when it is touched: a log that goes back in every line would have all columns cut for each."""
        for step, metrics in rows:
            self.add(step, metrics)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of one line."""
        if self.steps and step < self.steps[-1]:
            self.restarts.append((step, self.steps[-1]))
            del self.steps[bisect_left(self.steps, step) :]
            while self._cuts and self._cuts[-1][1] >= step:
                self._cuts.pop()
            self._cuts.append((len(self.restarts), step))
        if self.steps and step == self.steps[-1]:
            self.repeated += 1
        else:
            self.steps.append(step)
        for name, value in metrics.items():
            column = self._columns.setdefault(name, _Column())
            self._cut(column)
            if column.steps and column.steps[-1] == step:
                column.values[-1] = value
            else:
                column.steps.append(step)
                column.values.append(value)

    def _cut(self, column: "_Column") -> None:
        """Drop what an earlier life logged since the column was touched last."""
        place = bisect_right(self._cuts, column.restarts, key=lambda cut: cut[0])
        if place < len(self._cuts):
            count = bisect_left(column.steps, self._cuts[place][1])
            del column.steps[count:]
            del column.values[count:]
        column.restarts = len(self.restarts)

    def series(self) -> dict[str, Series]:
        """The collected series, by name."""
        for column in self._columns.values():
            self._cut(column)
        return {
            name: Series(column.steps, column.values)
            for name, column in self._columns.items()
            if column.steps
        }


@dataclass(frozen=True)
class Alert:
    """One line of ``alerts.jsonl``."""

    step: int
    title: str
    text: str
    cause: str = ""
    """Short name of what it is about, where a cause is known."""
    evidence: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SavedSample:
    """A sample as a run wrote it: a row of the validation table, or a line of a rollout dump."""

    step: int
    cells: Mapping[str, Any]
    """Cells by column: text, numbers, None."""


@dataclass(frozen=True)
class HeatMap:
    """Counts of log-ratios: steps across, values up; merged to the resolution that a page can show."""

    steps: Sequence[int]
    """First step of each column."""
    edges: Sequence[float]
    """Edges of the rows, ascending, nats; one more than rows."""
    counts: Sequence[Sequence[float]]
    """Counts by column, then row."""


@dataclass(frozen=True)
class Ending:
    """The end of the run, from ``ending.json``."""

    status: int
    """The exit code."""
    reason: str


@dataclass(frozen=True)
class ReplayedRecord:
    """The measurements of the replays of one step's record."""

    step: int
    version: int
    """Weights that the tokens are said to come from."""
    tokens: int
    gap: float
    """Root mean square of the log-ratio, nats; 0 where the trainer's log-probs were not recorded."""
    trainer: float = 0.0
    """R0: nats between the log-probs that the trainer recorded and those that it computes again; 0 where none
    were recorded."""
    share: float = 0.0
    """Share of the gap's variance that this difference explains."""
    trainer_twice: float = 0.0
    """R0: nats between two passes of the trainer."""
    noise: float = 0.0
    """Nats by which the trainer's precision alone may differ in other batches."""
    versions: Mapping[int, float] = field(default_factory=dict)
    """R3: by version of the weights, root mean square of its log-probs less the engine's, nats."""

    @property
    def best_version(self) -> int:
        """The weights whose log-probs are nearest to the engine's."""
        return min(
            self.versions, key=lambda version: (self.versions[version], -version), default=self.version
        )

    def as_json(self) -> dict[str, Any]:
        """Return the record for machines."""
        return asdict(self)


@dataclass
class RunData:
    """Everything that was found of a run."""

    name: str
    path: Path
    source: str
    """The source that was read, in words: ``verl_rc run``, ``verl's file logger``, …"""
    steps: Sequence[int] = ()
    series: Mapping[str, Series] = field(default_factory=dict)
    alerts: Sequence[Alert] = ()
    samples: Sequence[SavedSample] = ()
    heat_map: HeatMap | None = None
    tokens: TokenData | None = None
    """Token records, or None."""
    replays: Sequence[ReplayedRecord] = ()
    """Records that ``verl-rc diagnose --replay`` replayed."""
    plan: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The resolved configuration by dotted key, secrets masked; empty where none is known."""
    total_steps: int | None = None
    """Steps that the run was to do."""
    ending: Ending | None = None
    """The end of the run. None if it still trains, was killed, or is of another trainer."""
    notes: list[str] = field(default_factory=list)
    """Sentences on what was read, what was missing and what was repaired."""
    trainer: str = ""
    """The trainer, by the names of docs/token_record.md; empty for verl_rc, or where it is not known."""
    their_names: dict[str, str] = field(default_factory=dict)
    """The trainer's name of a metric, by our name, where they differ."""
    _finite: dict[str, Series] = field(default_factory=dict, repr=False)

    @property
    def is_own(self) -> bool:
        """Whether verl_rc wrote it: other trainers define some metrics otherwise."""
        return self.source == OWN_RUN

    def get(self, name: str) -> Series:
        """The finite values of a metric; empty when it was not logged."""
        if name not in self._finite:
            self._finite[name] = self.series.get(name, NO_SERIES).finite()
        return self._finite[name]

    def has(self, name: str) -> bool:
        """Whether the metric was logged at least once, as a finite number."""
        return len(self.get(name)) > 0

    def matching(self, prefix: str, suffix: str = "") -> Iterator[tuple[str, Series]]:
        """Finite values of all metrics whose names begin and end like this, by name."""
        for name in sorted(self.series):
            if name.startswith(prefix) and name.endswith(suffix) and (series := self.get(name)):
                yield name, series


OWN_RUN = "verl_rc run"
