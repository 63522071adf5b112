"""The accumulators: what adds up over rows, micro-batches and ranks, as records of one kind of number.

``T`` is a tensor ``[B]`` (what each row adds), a scalar on the device (the sum of these) or a float (the same on the host).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Extremes(Generic[T]):
    """Largest and smallest value; merged by maximum, not by sum. -inf: no value."""

    largest: T
    # Negated, so that one maximum over rows, parts and ranks serves both.
    negated_smallest: T


@dataclass(frozen=True)
class Mean(Generic[T]):
    """``count`` values by their sum."""

    total: T
    count: T

    @property
    def value(self: "Mean[float]") -> float:
        """0 when there are none."""
        return self.total / self.count if self.count else 0.0


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


@dataclass(frozen=True)
class WeightSums(Generic[T]):
    """Weights ``w`` of tokens, rows or prompts: ``excess`` of ``w - 1``, the others of ``w``."""

    # Near 1, where most weights are, sums of w round their spread away; near 0, where a band puts weights, sums of w - 1 do.
    excess: Moments[T]
    square: T
    extremes: Extremes[T]

    @property
    def mean(self: "WeightSums[float]") -> float:
        """0 when there are none."""
        return 1.0 + self.excess.value if self.excess.count else 0.0

    @property
    def effective_sample_size(self: "WeightSums[float]") -> float:
        """``(sum w)^2 / (n sum w^2)`` in [0, 1] (Kong 1992): the share of samples that would do as well with equal weights.

        0 when all weights are 0.
        """
        count = self.excess.count
        # Equal weights can round to a little above 1.
        return min((count + self.excess.total) ** 2 / (count * self.square), 1.0) if count and self.square > 0 else 0.0


@dataclass(frozen=True)
class WeightLevels(Generic[T]):
    """Weights of tokens, and their means over the tokens of each row and over the rows of each prompt."""

    tokens: WeightSums[T]
    rows: WeightSums[T]
    prompts: WeightSums[T] | None = None
    """None: groups are unknown."""


@dataclass(frozen=True)
class WeightTotals(Generic[T]):
    """Importance weights before normalisation."""

    applied: WeightLevels[T]
    raw: WeightLevels[T] | None
    """Before the threshold: with full diagnostics, and where all tokens of a row share one weight."""


@dataclass(frozen=True)
class RuleTotals(Generic[T]):
    """The statistic of one rejection rule, over tokens or, for ``seq_*`` rules, over rows."""

    clamped: Moments[T]
    """Clamped to the rule's bounds and counted from the one nearest to 0, over tokens: of ``seq_*`` the row's on each of them."""
    extremes: Extremes[T]
    rows: Moments[T]
    """Over rows; for rules of tokens the mean over a row's tokens."""
    row_extremes: Extremes[T]


@dataclass(frozen=True)
class Gap(Generic[T]):
    """How far the policies are apart on some tokens."""

    tokens: T
    log_ratio: T
    k3: T


@dataclass(frozen=True)
class AgeTotals(Generic[T]):
    """The tokens of one age."""

    gap: Gap[T]
    rejected: Mean[T]
    """Response tokens that are rejected, of all."""
    weights: WeightSums[T] | None
    """Applied to these tokens, before normalisation."""
    truncated: T | None
    """Tokens whose weight the threshold changed."""


@dataclass(frozen=True)
class FullTotals(Generic[T]):
    """What full diagnostics add."""

    log_ratio: Extremes[T]
    """Over tokens."""
    token_ratios: Moments[T]
    """Of ``rho - 1``."""
    row_ratios: Moments[T]
    """Of the product of a row's ratios, less 1."""
    turns: tuple[Gap[T], ...]
    """By turn of the policy; the last holds all later ones."""
    splits: dict[str, Mean[T]]
    """Metrics of some group of rows or tokens, by name, left out where nothing is in it."""


@dataclass(frozen=True)
class Totals(Generic[T]):
    """Everything that is measured of some rows, before rejection."""

    tokens: T
    """Response tokens with two finite log-probs."""
    kept_tokens: T
    kept_rows: T
    """Rows with a kept token."""
    means: dict[str, Mean[T]]
    """Metrics that are plain means or shares, by name."""
    log_ppl_diff: Extremes[T]
    weights: WeightTotals[T] | None
    rules: dict[str, RuleTotals[T]]
    ages: tuple[AgeTotals[T], ...]
    """By updates since the weights that sampled a token; the last holds all older ones. Empty: ages are unknown."""
    age: Extremes[T] | None
    full: FullTotals[T] | None


def map_totals(convert: Callable[..., Any], *records: Any, is_extreme: bool = False) -> Any:
    """One record from records of one shape: ``convert(*numbers, is_extreme=...)`` in place of every number, in a fixed order."""
    # Fields and dictionaries keep their order, so that every rank puts a number at the same place of the vector it reduces.
    first = records[0]
    if isinstance(first, dict):
        return {name: map_totals(convert, *(record[name] for record in records)) for name in first}
    if isinstance(first, tuple):
        return tuple(map_totals(convert, *parts) for parts in zip(*records, strict=True))
    if is_dataclass(first):
        values = [[getattr(record, field.name) for record in records] for field in fields(first)]
        record_type: Callable[..., Any] = type(first)
        return record_type(*(map_totals(convert, *parts, is_extreme=isinstance(first, Extremes)) for parts in values))
    return None if first is None else convert(*records, is_extreme=is_extreme)
