"""The record in which any part of a run reports one number, with how it is to be reduced."""

import math
from dataclasses import dataclass
from enum import StrEnum


class Reduction(StrEnum):
    """How the records of one name become one number."""

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
    """What a mean is weighted by, usually the tokens or rows behind ``value``; other reductions do not look at it."""

    def __post_init__(self) -> None:
        """Check the weight."""
        if not (self.weight >= 0 and math.isfinite(self.weight)):
            raise ValueError(f"the weight of metric '{self.name}' must be finite and at least 0, got {self.weight}.")
