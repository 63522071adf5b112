"""The metric record, and its exact reduction, which does not depend on how records are split or ordered."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How the records of one name are reduced to one number."""

    MEAN = "mean"
    """Σ value·weight / Σ weight."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"
    """The record handed in last; the only reduction that depends on the order."""


@dataclass(frozen=True)
class Metric:
    """One reported number.

    Example: a mean entropy of 0.84 nats over the 310 tokens of a micro-batch is
    ``Metric("actor/entropy", 0.84, weight=310)``.
    """

    name: str
    """A name of ``verl_rc.metrics.catalog``."""
    value: float
    reduction: Reduction = Reduction.MEAN
    weight: float = 1.0
    """Weight of a mean, usually the number of tokens or rows behind ``value``; other reductions ignore it."""

    def __post_init__(self) -> None:
        """Check the weight."""
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(
                f"the weight of metric '{self.name}' must be finite and at least 0, got {self.weight}."
            )


def reduce_metrics(records: Iterable[Metric]) -> dict[str, float]:
    """Reduce records to one number a name.

    A mean whose weights are all 0 is omitted. NaN stays NaN in every reduction but ``LAST``.

    Raises:
        ValueError: a name comes with two different reductions.
    """
    by_name: dict[str, list[Metric]] = defaultdict(list)
    for record in records:
        by_name[record.name].append(record)
    reduced: dict[str, float] = {}
    for name, group in by_name.items():
        reductions = sorted({record.reduction for record in group})
        if len(reductions) > 1:
            raise ValueError(f"metric '{name}' must have one reduction, got {' and '.join(reductions)}.")
        value = _reduce_group(group, reductions[0])
        if value is not None:
            reduced[name] = value
    return reduced


def _reduce_group(group: Sequence[Metric], reduction: Reduction) -> float | None:
    values = [record.value for record in group]
    match reduction:
        case Reduction.MEAN:
            return _weighted_mean(group)
        case Reduction.SUM:
            return _exact_sum(values)
        case Reduction.LAST:
            return values[-1]
        case Reduction.MIN | Reduction.MAX:
            extreme = min if reduction is Reduction.MIN else max
            return math.nan if any(math.isnan(value) for value in values) else extreme(values)


def _weighted_mean(group: Sequence[Metric]) -> float | None:
    """Weighted mean without the records of weight 0, because an empty micro-batch may report NaN."""
    counted = [record for record in group if record.weight > 0]
    if not counted:
        return None
    total = _exact_sum([record.value * record.weight for record in counted])
    return total / math.fsum(record.weight for record in counted)


def _exact_sum(values: Sequence[float]) -> float:
    """A correctly rounded sum, which does not depend on the order; infinities and NaN propagate instead of
    raising."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
