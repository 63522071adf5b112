"""Sums over sequences, micro-batches and ranks, as records of one kind of number: a tensor or, on the host, a
float."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

from verl_rc.metrics.mergeable import Extremes, Mean, Moments
from verl_rc.metrics.signatures import Signatures

T = TypeVar("T")


@dataclass(frozen=True)
class WeightSums(Generic[T]):
    """Sums of the weights ``w`` of tokens, sequences or prompts: ``excess`` of ``w - 1``, the others of
    ``w``."""

    # Near 1, where most weights are, sums of w round their spread away; near 0, where a band puts weights,
    # sums of w - 1 do.
    excess: Moments[T]
    square: T
    extremes: Extremes[T]

    @property
    def mean(self: "WeightSums[float]") -> float:
        """The mean of the weights; 0 without any."""
        return 1.0 + self.excess.value if self.excess.count else 0.0

    @property
    def effective_sample_size(self: "WeightSums[float]") -> float:
        """``(sum w)^2 / (n sum w^2)`` in [0, 1] (Kong 1992): the share of samples that would do as well with
        equal weights.

        0 when all weights are 0.
        """
        count = self.excess.count
        # Equal weights can round to a little above 1.
        return (
            min((count + self.excess.total) ** 2 / (count * self.square), 1.0)
            if count and self.square > 0
            else 0.0
        )


@dataclass(frozen=True)
class RuleTotals(Generic[T]):
    """The statistic of one rejection rule."""

    clamped: Moments[T]
    """Over tokens: clamped to the rule's bounds and counted from the one nearest to 0."""
    extremes: Extremes[T]
    """Over tokens."""
    sequences: Moments[T]
    """Over sequences, of the mean over the tokens of each."""
    sequence_extremes: Extremes[T]


@dataclass(frozen=True)
class Totals(Generic[T]):
    """Everything that is measured of some sequences, before rejection. ``T`` is a tensor or, on the host, a
    float.

    Dictionaries hold by name what the configuration and the facts that are known ask for.
    """

    means: dict[str, Mean[T]] = field(default_factory=dict)
    """Metrics that are plain means or shares; 0 where nothing was measured."""
    splits: dict[str, Mean[T]] = field(default_factory=dict)
    """Metrics of some group of sequences or tokens, left out where nothing is in it."""
    unreported: dict[str, Mean[T]] = field(default_factory=dict)
    """Means that are no metrics by themselves: ``distance``, of ``|l|``; ``kept_tokens``, the share of
    response tokens that are kept; ``kept_rows``, the share of sequences with response tokens that have a kept
    one."""
    extremes: dict[str, Extremes[T]] = field(default_factory=dict)
    """Extremes of ``distance`` (that of ``l`` from 0) and of ``log_ppl_diff``."""
    weights: dict[str, WeightSums[T]] = field(default_factory=dict)
    """Importance weights before normalisation, applied or raw, by level (``applied_token``, …,
    ``raw_prompt``). Raw ones, before the threshold: with full diagnostics, and where all tokens of a sequence
    share one weight."""
    rules: dict[str, RuleTotals[T]] = field(default_factory=dict)
    ratios: Moments[T] | None = None
    """Moments of ``rho - 1``, for the test for misalignment. None without full diagnostics, and after the
    step's first update, where the trainer no longer has the weights that should agree."""
    signatures: Signatures[T] | None = None
    """Sums for the signatures. None where ``ratios`` is."""


def map_numbers(convert: Callable[..., Any], record: Any, is_extreme: bool = False) -> Any:
    """A record of the same shape with ``convert(number, is_extreme=...)`` in place of every number, in a
    fixed order."""
    # Fields and dictionaries keep their order, so that every rank puts a number at the same place of the
    # vector it reduces.
    if isinstance(record, dict):
        return {name: map_numbers(convert, value) for name, value in record.items()}
    if isinstance(record, tuple):
        return tuple(map_numbers(convert, value) for value in record)
    if is_dataclass(record):
        values = (getattr(record, place.name) for place in fields(record))
        record_type: Callable[..., Any] = type(record)
        return record_type(*(map_numbers(convert, value, isinstance(record, Extremes)) for value in values))
    return None if record is None else convert(record, is_extreme=is_extreme)
