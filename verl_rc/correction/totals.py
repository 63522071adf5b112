"""The accumulators: what adds up over sequences, micro-batches and ranks, as records of one kind of number.

``T`` is a tensor ``[B]`` (what each sequence adds), a scalar on the device (the sum of these) or a float (the
same on the host).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from verl_rc.metrics.mergeable import Extremes, Mean, Moments
from verl_rc.metrics.signatures import Signatures

T = TypeVar("T")


Means = dict[str, Mean[T]]
"""Metrics that are plain means or shares, by name."""


@dataclass(frozen=True)
class WeightSums(Generic[T]):
    """Weights ``w`` of tokens, sequences or prompts: ``excess`` of ``w - 1``, the others of ``w``."""

    # Near 1, where most weights are, sums of w round their spread away; near 0, where a band puts weights,
    # sums of w - 1 do.
    excess: Moments[T]
    square: T
    extremes: Extremes[T]

    @property
    def mean(self: "WeightSums[float]") -> float:
        """0 when there are none."""
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
    """The statistic of one rejection rule, over tokens or, for ``seq_*`` rules, over sequences."""

    clamped: Moments[T]
    """Clamped to the rule's bounds and counted from the one nearest to 0, over tokens: of ``seq_*`` the
    sequence's on each."""
    extremes: Extremes[T]
    sequences: Moments[T]
    """Over sequences; for rules on tokens the mean over those of each."""
    sequence_extremes: Extremes[T]


@dataclass(frozen=True)
class Totals(Generic[T]):
    """Everything that is measured of some sequences, before rejection.

    Dictionaries hold by name what the configuration and the facts that are known ask for.
    """

    means: Means[T] = field(default_factory=dict)
    """Metrics."""
    splits: Means[T] = field(default_factory=dict)
    """Metrics of some group of sequences or tokens, left out where nothing is in it."""
    unreported: Means[T] = field(default_factory=dict)
    """What is no metric by itself: ``distance``, the mean of ``|l|``; ``kept_tokens`` of response tokens, and
    ``kept_rows`` of rows with some, those with a kept token."""
    extremes: dict[str, Extremes[T]] = field(default_factory=dict)
    """``distance`` (that of ``log_ratio`` from 0), ``log_ppl_diff``."""
    weights: dict[str, WeightSums[T]] = field(default_factory=dict)
    """Importance weights before normalisation, applied or raw, by level (``applied_token``, …,
    ``raw_prompt``). Raw ones, before the threshold, of tokens: with full diagnostics, and where all tokens of
    a sequence share one weight."""
    rules: dict[str, RuleTotals[T]] = field(default_factory=dict)
    ratios: Moments[T] | None = None
    """``rho - 1``, for the test for misalignment. None without full diagnostics, and after the step's first
    update, where the trainer no longer has the weights that should agree."""
    signatures: Signatures[T] | None = None
    """None where ``ratios`` is."""


@dataclass(frozen=True)
class SequenceSums:
    """Tokens of sequences and what their log-ratios add up to; float64 ``[B]``."""

    tokens: Tensor
    """Valid tokens: response tokens with two finite log-probs."""
    response_tokens: Tensor
    log_ratio: Tensor
    """``sum_t l_t`` over the valid tokens, unbounded."""
    distance: Tensor
    """``sum_t |l_t|``."""
    farthest: Tensor
    """``max_t |l_t|``; -inf where there are no positions."""

    @property
    def valid_rows(self) -> Tensor:
        """1 for sequences with valid tokens, over which means of sequences are taken, and 0 for all
        others."""
        return self.tokens.clamp_max(1.0)

    @property
    def response_rows(self) -> Tensor:
        """1 for sequences with response tokens, and 0 for all others."""
        return self.response_tokens.clamp_max(1.0)

    def mean(self, sums: Tensor) -> Tensor:
        """Means over the valid tokens of each sequence, from their sums; 0 for sequences without any."""
        return sums / self.tokens.clamp_min(1.0)


@dataclass(frozen=True)
class RuleSums:
    """What one rejection rule measures in each sequence, float64 ``[B]``."""

    mean: Tensor
    """The statistic of the sequence; of a rule on tokens the mean over them."""
    total: Tensor
    """Sum over tokens."""
    clamped: Moments[Tensor]
    extremes: Extremes[Tensor]
    """Both as in ``RuleTotals``."""
    above: Tensor
    """Tokens, or 1 for a sequence, above the rule's bounds."""
    below: Tensor
    """Likewise, below them."""


@dataclass(frozen=True)
class TokenSums:
    """What the tokens of sequences add up to, float64 ``[B]``: all that needs a look at single tokens."""

    sequences: SequenceSums
    kept_tokens: Tensor
    """Response tokens that are not rejected by themselves."""
    row_statistics: dict[str, Tensor]
    """What decides whether a sequence is rejected, by cause: of each rule on sequences its statistic, of
    ``veto`` the number of tokens below it."""
    train: Tensor
    """Log-probs under the train policy."""
    bounded: Tensor
    """Log-ratios within ±``LOG_RATIO_BOUND``."""
    ratios: Moments[Tensor]
    """``rho - 1``."""
    rules: dict[str, RuleSums]
    """Of rules on tokens."""
    row_weights: dict[str, Tensor]
    """``applied`` and ``raw``: ``w - 1`` of each sequence, its tokens' mean; empty without weights."""
    totals: Totals[Tensor]
    """What is measured already."""
    kept: Means[Tensor] = field(default_factory=dict)
    """Response tokens that are not rejected by themselves, by age and by sign of the advantage."""


def join_sequences(parts: Sequence[T], rows: Tensor) -> T:
    """One record of columns ``[B]`` from records of chunks, which hold ``rows`` ``[B]`` one after the
    other."""
    place = rows.argsort()
    joined: T = map_totals(lambda *columns, is_extreme: torch.cat(columns).index_select(0, place), *parts)
    return joined


def map_totals(convert: Callable[..., Any], *records: Any, is_extreme: bool = False) -> Any:
    """One record from records of one shape: ``convert(*numbers, is_extreme=...)`` in place of every number,
    in a fixed order."""
    # Fields and dictionaries keep their order, so that every rank puts a number at the same place of the
    # vector it reduces.
    first = records[0]
    if isinstance(first, dict):
        return {name: map_totals(convert, *(record[name] for record in records)) for name in first}
    if isinstance(first, tuple):
        return tuple(map_totals(convert, *parts) for parts in zip(*records, strict=True))
    if is_dataclass(first):
        values = [[getattr(record, place.name) for record in records] for place in fields(first)]
        record_type: Callable[..., Any] = type(first)
        return record_type(
            *(map_totals(convert, *parts, is_extreme=isinstance(first, Extremes)) for parts in values)
        )
    return None if first is None else convert(*records, is_extreme=is_extreme)
