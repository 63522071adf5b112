"""Statistics as Python numbers, and the means, deviations and effective sample sizes read from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Numbers:
    """All statistics of some rows, on the host."""

    sums: Mapping[str, float]
    """By name."""
    maxima: Mapping[str, float]
    """By name; minima are negated, -inf: nothing seen."""
    histograms: list[list[float]]
    """Counts of log-ratios: tokens, row sums, row means; empty without full diagnostics."""

    def moments(self, name: str, count: float) -> "Moments":
        """Of the ``count`` values behind ``<name>.sum`` and ``<name>.square``."""
        return Moments(self.sums[f"{name}.sum"], self.sums[f"{name}.square"], count)

    def extremes(self, prefix: str, name: str) -> dict[str, float]:
        """``<prefix>max`` and ``<prefix>min`` of ``name``; 0 where there was nothing."""
        largest, smallest = self.maxima[f"{name}.max"], -self.maxima[f"{name}.negated_min"]
        return {
            f"{prefix}max": 0.0 if largest == -math.inf else largest,
            f"{prefix}min": 0.0 if smallest == math.inf else smallest,
        }

    def share(self, part: str, whole: str) -> float:
        """Quotient of two sums; 0 when there is no whole."""
        return self.sums[part] / self.sums[whole] if self.sums[whole] else 0.0


@dataclass(frozen=True)
class Moments:
    """``count`` values by their sum and the sum of their squares."""

    total: float
    """Sum."""
    square: float
    """Sum of squares."""
    count: float
    """How many."""

    @property
    def mean(self) -> float:
        """0 when there are none."""
        return self.total / self.count if self.count else 0.0

    @property
    def variance(self) -> float:
        """Population variance, 0 when there are none."""
        return max(self.square / self.count - self.mean**2, 0.0) if self.count else 0.0

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(self.variance)

    @property
    def sample_std(self) -> float:
        """Standard deviation with Bessel's correction, 0 for fewer than two values."""
        return math.sqrt(self.variance * self.count / (self.count - 1)) if self.count > 1 else 0.0


def effective_sample_size(total: float, square: float, count: float) -> float:
    """``(sum w)^2 / (n sum w^2)`` in [0, 1] (Kong 1992); 0 when all weights are 0.

    That share of the samples, equally weighted, would give an estimate as precise.
    """
    if not square > 0 or not count:
        return 0.0
    return min(total**2 / (count * square), 1.0)
