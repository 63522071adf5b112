"""Mergeable statistics, of which losses, rollout correction and metric records are made: the mean (a sum and
a count), moments, quotients and extremes."""

import math
from dataclasses import dataclass, fields
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Mean(Generic[T]):
    """The mean of ``count`` values as their sum and number. The means of parts of a batch merge:
    ``mean = sum of totals / sum of counts``.

    ``T`` is a tensor, whose parts are float64 and detached, or a float.
    """

    total: T
    count: T

    def __add__(self, other: Self) -> Self:
        """Merge two disjoint parts."""
        parts: Any = ([getattr(part, field.name) for field in fields(self)] for part in (self, other))
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
    """Mean and variance of ``count`` values, as their number, sum and sum of squares; 0 without values."""

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


@dataclass(frozen=True)
class Quotient(Generic[T]):
    """``sum a / sum b`` over sequences, with its standard error. Sequences are independent of each other; the
    tokens of one sequence are not."""

    a: T
    b: T
    aa: T
    ab: T
    bb: T

    @classmethod
    def from_sequences(cls, a: T, b: T) -> Self:
        """Sum up what each sequence adds, tensors ``[B]``."""
        first: Any = a
        second: Any = b
        return cls(a, b, first * first, first * second, second * second)

    @property
    def value(self: "Quotient[float]") -> float:
        """The quotient; 0 when there is nothing to divide by."""
        return self.a / self.b if self.b else 0.0

    @property
    def error(self: "Quotient[float]") -> float:
        """Standard error over sequences."""
        value = self.value
        return (
            math.sqrt(max(self.aa - 2 * value * self.ab + value**2 * self.bb, 0.0)) / self.b
            if self.b
            else 0.0
        )

    @property
    def z(self: "Quotient[float]") -> float | None:
        """The value in standard errors; None where sequences do not differ, so that there is nothing to
        compare it with."""
        if self.aa == 0.0:
            return 0.0
        # Sequences that are all the same leave an error of rounding, not of 0.
        return self.value / self.error if self.error * self.b > 1e-6 * math.sqrt(self.aa) else None


@dataclass(frozen=True)
class Extremes(Generic[T]):
    """Largest and smallest value; merged by maximum, not by sum. -inf: no value."""

    largest: T
    # Negated, so that one maximum over sequences, parts and ranks serves both.
    negated_smallest: T

    @property
    def farthest(self: "Extremes[float]") -> float:
        """The largest distance from 0; 0 without any value."""
        return max(self.largest, self.negated_smallest, 0.0)
