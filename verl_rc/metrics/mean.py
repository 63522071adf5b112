"""The mergeable mean, of which losses, rollout correction and metric records are made: a sum and a count."""

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mean(Generic[T]):
    """``count`` values by their sum. Parts of a batch add up: ``mean = sum of totals / sum of counts``.

    ``T`` is a tensor, whose parts are float64 and detached, or a float.
    """

    total: T
    count: T

    def __add__(self, other: Self) -> Self:
        """Merge two disjoint parts."""
        parts: Any = ([getattr(one, field.name) for field in fields(self)] for one in (self, other))
        return type(self)(*(mine + theirs for mine, theirs in zip(*parts, strict=True)))

    @property
    def value(self) -> T:
        """The mean; 0 when there is nothing. That of tensors stays on their device."""
        total: Any = self.total
        count: Any = self.count
        mean: T = total / (count + (count == 0))
        return mean


@dataclass(frozen=True)
class Moments(Mean[T]):
    """``count`` values by their sum and the sum of their squares; everything is 0 when there are none."""

    square: T

    @property
    def variance(self: "Moments[float]") -> float:
        """Population variance."""
        # Rounding can leave the difference of two equal numbers a little below 0, where a root would be NaN.
        return max(self.square / self.count - self.value**2, 0.0) if self.count else 0.0

    @property
    def std(self: "Moments[float]") -> float:
        """Population standard deviation."""
        return math.sqrt(self.variance)

    @property
    def sample_std(self: "Moments[float]") -> float:
        """Standard deviation with Bessel's correction, 0 for fewer than two values."""
        return math.sqrt(self.variance * self.count / (self.count - 1)) if self.count > 1 else 0.0
