"""The metric record, and its reduction, which does not depend on how records are split or ordered."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from verl_rc.metrics.mergeable import Mean


class Reduction(str, Enum):
    """The rule that reduces the records of one name to one number."""

    MEAN = "mean"
    """The mean of ``Mean`` records, or of numbers that count once each."""
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"
    """The record handed in last; the only reduction that depends on the order."""


@dataclass(frozen=True)
class Metric:
    """One reported number.

    Example: entropies of 310 tokens, 260.4 nats together, are ``Metric("actor/entropy", Mean(260.4, 310))``.
    """

    name: str
    """A name of ``verl_rc.metrics.catalog``."""
    value: float | Mean[float]
    reduction: Reduction = Reduction.MEAN

    def __post_init__(self) -> None:
        """Check that the value is one that the reduction takes."""
        if not isinstance(self.value, Mean):
            return
        if self.reduction is not Reduction.MEAN:
            raise TypeError(
                f"metric '{self.name}' must be a number to be reduced by {self.reduction.value}, got a mean."
            )
        if not 0 <= self.value.count < math.inf:
            raise ValueError(
                f"the count of metric '{self.name}' must be finite and at least 0, got {self.value.count}."
            )


def reduce_metrics(records: Iterable[Metric]) -> dict[str, float]:
    """Reduce records to one number a name.

    A mean of nothing is omitted. NaN stays NaN in every reduction but ``LAST``.

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
    if reduction is Reduction.MEAN:
        means = [
            record.value if isinstance(record.value, Mean) else Mean(record.value, 1.0) for record in group
        ]
        parts = [mean for mean in means if mean.count > 0]  # an empty micro-batch may report NaN
        count = math.fsum(mean.count for mean in parts)
        return _exact_sum([mean.total for mean in parts]) / count if parts else None
    values = [record.value for record in group if not isinstance(record.value, Mean)]
    match reduction:
        case Reduction.SUM:
            return _exact_sum(values)
        case Reduction.LAST:
            return values[-1]
        case Reduction.MIN | Reduction.MAX:
            extreme = min if reduction is Reduction.MIN else max
            return math.nan if any(math.isnan(value) for value in values) else extreme(values)


def _exact_sum(values: Sequence[float]) -> float:
    """A correctly rounded sum, which does not depend on the order; infinities and NaN propagate instead of
    raising."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
