"""The accumulators: what adds up over rows, micro-batches and ranks, as records of one kind of number.

``T`` is a tensor ``[B]`` (what each row adds), a scalar on the device (the sum of these) or a float (the same on the host).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

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


Means = dict[str, Mean[T]]
"""Metrics that are plain means or shares, by name."""


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
class RuleSums(Generic[T]):
    """What one rejection rule found in each sequence."""

    mean: T
    """The statistic of the sequence; of a rule on tokens the mean over them."""
    total: T
    """Sum over tokens."""
    clamped: Moments[T]
    extremes: Extremes[T]
    """As in ``RuleTotals``."""
    above: T
    """Tokens, or 1 for a sequence, above the rule's bounds."""
    below: T


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

    @property
    def mean_k3(self: "Gap[float]") -> float:
        """The k3 estimate of KL(rollout || train), nats per token; 0 without tokens."""
        return self.k3 / self.tokens if self.tokens else 0.0


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
    splits: Means[T]
    """Metrics of some group of rows or tokens, by name, left out where nothing is in it."""


@dataclass(frozen=True)
class Totals(Generic[T]):
    """Everything that is measured of some rows, before rejection."""

    gap: Gap[T]
    """Over the response tokens with two finite log-probs."""
    response_tokens: T
    kept_tokens: T
    kept_rows: T
    """Rows with a kept token."""
    means: Means[T]
    log_ppl_diff: Extremes[T]
    weights: WeightTotals[T] | None
    rules: dict[str, RuleTotals[T]]
    ages: tuple[AgeTotals[T], ...]
    """By updates since the weights that sampled a token; the last holds all older ones. Empty: ages are unknown."""
    age: Extremes[T] | None
    full: FullTotals[T] | None

    @property
    def nonfinite_fraction(self: "Totals[float]") -> float:
        """Share of the response tokens with a log-prob that is NaN or infinite."""
        return Mean(self.response_tokens - self.gap.tokens, self.response_tokens).value


@dataclass(frozen=True)
class SequenceSums(Generic[T]):
    """Tokens of sequences, and the log-ratios of their products; float64 ``[B]``."""

    tokens: T
    """Valid tokens: response tokens with two finite log-probs."""
    response_tokens: T
    log_ratio: T
    """``sum_t l_t`` over the valid tokens, unbounded."""

    @property
    def real(self: "SequenceSums[Tensor]") -> Tensor:
        """1 for sequences with valid tokens, which means over sequences are taken of, and 0 for all others."""
        return self.tokens.clamp_max(1.0)

    def mean(self: "SequenceSums[Tensor]", sums: Tensor) -> Tensor:
        """Means over the valid tokens of each sequence, from their sums; 0 for sequences without any."""
        return sums / self.tokens.clamp_min(1.0)


@dataclass(frozen=True)
class TokenSums(Generic[T]):
    """What the tokens of sequences add up to, ``[B]``: all that needs a look at single tokens."""

    sums: SequenceSums[T]
    gap: Gap[T]
    train: T
    """Log-probs under the train policy."""
    ratios: Moments[T]
    """``rho - 1``."""
    kept: T
    """Response tokens that are not rejected by themselves."""
    below_veto: T | None
    statistics: dict[str, T]
    """By name of a rule on sequences."""
    means: Means[T]
    rules: dict[str, RuleSums[T]]
    """Of rules on tokens."""
    weights: tuple[WeightSums[T], ...]
    """Applied, and with full diagnostics raw. Empty: there are none, or all tokens of a sequence share one."""
    raw_weight: T | None
    """Their mean ``w - 1`` before the threshold."""
    ages: tuple[AgeTotals[T], ...]
    age: Extremes[T] | None
    full: FullTotals[T] | None
    """Its splits are by sign of the advantage: tokens not rejected by themselves, of all."""
    alone: dict[str, T]
    """With full diagnostics, by cause: tokens that no other cause rejects by themselves."""


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
