"""Mergeable statistics: sums over sequences that are added over micro-batches and ranks without loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.by_age import buckets, gap, totals_by_age
from verl_rc.correction.histogram import NUM_BINS, log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.metrics import Numbers, correction_metrics
from verl_rc.correction.rejection import Means, Rejection, exclusive_fractions, rejection_means, rule_totals
from verl_rc.correction.sequences import SequenceContext
from verl_rc.correction.totals import AgeTotals, Extremes, FullTotals, Mean, Moments, Totals, map_totals
from verl_rc.correction.weights import Weights, weight_totals
from verl_rc.tensor_ops import LOG_RATIO_BOUND, bound_log_ratio

NUM_TURNS = 5
"""Turns are told apart up to the last of these, which stands for all later ones too."""
LENGTH_EDGES = (16, 64, 256, 1024, 4096, 16384)
"""Upper edges, in response tokens and inclusive, of the length buckets; the last bucket has none."""


@dataclass(frozen=True)
class CorrectionStatistics:
    """What was measured of some rows; the statistics of a batch are the merged ones of its parts.

    To merge over ranks: all-reduce ``sums`` with SUM and ``maxima`` with MAX, then ``with_vectors``.
    """

    sums: Tensor
    """float64: what adds up of ``Totals``, in the order of its fields; then, with full diagnostics, ``log_ratio_histograms``."""
    maxima: Tensor
    """float64: the extremes of ``Totals``."""
    layout: Totals[float]
    """The record itself, with 0 in place of every number."""

    @classmethod
    def from_sequences(cls, rows: Totals[Tensor], histograms: Tensor) -> "CorrectionStatistics":
        """Statistics of what every row adds: columns ``[B]``."""
        sums: list[Tensor] = []
        maxima: list[Tensor] = []

        def put(column: Tensor, is_extreme: bool) -> float:
            (maxima if is_extreme else sums).append(column.double())
            return 0.0

        # float64 also for counts: float32 would stop counting tokens at 16 million.
        layout = map_totals(put, rows)
        # Over no rows at all the maximum is that of the padding: nothing seen.
        largest = pad(torch.stack(maxima), (0, 1), value=-torch.inf).amax(dim=1)
        return cls(torch.cat([torch.stack(sums).sum(dim=1), histograms]), largest, layout)

    def totals(self) -> Totals[Tensor]:
        """The record with scalars that are still on their device."""
        return self._filled(self.sums.unbind(), self.maxima.unbind())[0]

    def numbers(self) -> Numbers:
        """All statistics as Python numbers; read from the device once, in one copy."""
        return self._numbers

    @cached_property
    def _numbers(self) -> Numbers:
        flat = torch.cat([self.maxima, self.sums]).tolist()
        totals, counts = self._filled(flat[len(self.maxima) :], flat)
        return Numbers(totals, [counts[start : start + NUM_BINS] for start in range(0, len(counts), NUM_BINS)])

    def _filled(self, sums: Sequence[Any], maxima: Sequence[Any]) -> tuple[Totals[Any], list[Any]]:
        added, extremes = iter(sums), iter(maxima)
        return map_totals(lambda _, is_extreme: next(extremes if is_extreme else added), self.layout), list(added)

    def metrics(self, config: RolloutCorrectionConfig) -> dict[str, float]:
        """``rollout_corr/*`` of the rows measured, by name; one copy from the device."""
        return correction_metrics(self.numbers(), config.settings())

    def merge(self, other: "CorrectionStatistics") -> "CorrectionStatistics":
        """Statistics of both parts together. Raises ``ValueError`` unless the same was measured of both."""
        # Compared as text: dictionaries in different orders are equal, but their numbers stand at different places.
        if repr(self.layout) != repr(other.layout):
            raise ValueError(
                "statistics merge only when one configuration measured both, knowing the same facts about rows; got "
                f"{sorted(self.layout.means)} and {sorted(other.layout.means)}"
            )
        return self.with_vectors(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def with_vectors(self, sums: Tensor, maxima: Tensor) -> "CorrectionStatistics":
        """The same with other numbers: after a reduction, or on another device."""
        return replace(self, sums=sums, maxima=maxima)


def sequence_totals(
    ratio: LogRatio, rejection: Rejection, weights: Weights | None, settings: CorrectionSettings, facts: SequenceContext
) -> Totals[Tensor]:
    """What every row adds, ``[b]``."""
    means = _gap_means(ratio) | rejection_means(ratio, rejection, settings)
    of_weights, rules, full = None, {}, None
    if settings.weights is not None and weights is not None:
        of_weights, shares = weight_totals(weights, settings.weights, ratio, full=settings.full)
        means |= shares
    for rule in settings.rules:
        rules[rule.name], shares = rule_totals(rule, ratio, rejection)
        means |= shares
    by_age: tuple[AgeTotals[Tensor], ...] = ()
    age: Extremes[Tensor] | None = None
    if (ages := facts.ages(ratio.response)) is not None:
        by_age, age = totals_by_age(ratio, ages, rejection, weights), extremes(ages, ratio.ones)
        means["token_age_mean"] = Mean(sequence_sum(ages * ratio.ones), ratio.tokens)
    if settings.full:
        means["log_ratio_exact_fraction"] = Mean(ratio.count(indicator(torch.eq, ratio.values, 0.0)), ratio.tokens)
        means["safety_clamped_seq_fraction"] = Mean(ratio.sums.abs() > LOG_RATIO_BOUND, ratio.real)
        mask, product = ratio.response.bool(), torch.expm1(bound_log_ratio(ratio.sums))
        begins = mask & ~pad(mask[:, :-1], (1, 0))  # a turn is a run of response tokens without a tool's between them
        full = FullTotals(
            log_ratio=extremes(ratio.values, ratio.ones),
            token_ratios=ratio.ratios,
            row_ratios=Moments(product, ratio.real, product.square()),
            turns=tuple(gap(ratio, here * ratio.ones) for here in buckets(begins.cumsum(dim=-1) - 1, NUM_TURNS)),
            splits=_splits(ratio, rejection, settings, facts),
        )
    difference = extremes(-ratio.mean(ratio.sums), ratio.tokens)
    return Totals(ratio.tokens, rejection.kept, rejection.kept > 0, means, difference, of_weights, rules, by_age, age, full)


def _gap_means(ratio: LogRatio) -> Means:
    """How far the policies are apart, before any weight or rule."""
    tokens, real, response = ratio.tokens, ratio.real, ratio.response_tokens
    train, difference = ratio.mean(sequence_sum(ratio.train)), -ratio.mean(ratio.sums)
    rollout = train + difference
    return {
        "training_ppl": Mean(real * (-train).exp(), real),
        "training_log_ppl": Mean(-train, real),  # log-perplexities are minus mean log-probs
        "rollout_ppl": Mean(real * (-rollout).exp(), real),
        "rollout_log_ppl": Mean(-rollout, real),
        "log_ppl_diff": Mean(difference, real),
        "log_ppl_abs_diff": Mean(difference.abs(), real),
        "ppl_ratio": Mean(real * difference.exp(), real),
        "kl": Mean(-ratio.sums, tokens),
        # Sums of both terms instead of a sum of k3: one pass less; rounding may leave a little below 0.
        "k3_kl": Mean((ratio.ratios.total - sequence_sum(ratio.precise)).clamp_min(0.0), tokens),
        # rho^2 - 1 from rho - 1: exact near 0, and no second exponential.
        "chi2_token": Mean(ratio.ratios.square + 2.0 * ratio.ratios.total, tokens),
        "chi2_seq": Mean(torch.expm1(2.0 * bound_log_ratio(ratio.sums)), real),
        "nonfinite_token_fraction": Mean(response - tokens, response),
        "safety_clamped_fraction": Mean(ratio.count(indicator(torch.ne, ratio.values, ratio.bounded)), tokens),
    }


def _splits(ratio: LogRatio, rejection: Rejection, settings: CorrectionSettings, facts: SequenceContext) -> Means:
    """What each cause rejects alone; share of tokens kept by length of the response, sign of the advantage and correctness;
    scores of kept and of rejected rows."""
    splits = exclusive_fractions(ratio, rejection) if settings.rejects else {}
    if facts.advantages is not None:
        for name, found in (("positive", facts.advantages > 0), ("negative", facts.advantages < 0)):
            kept = rejection.keep_rows * sequence_sum(found * rejection.keep_tokens)
            splits[f"kept_fraction_{name}_advantage"] = Mean(kept, sequence_sum(found * ratio.response))
    response, kept = ratio.response_tokens, rejection.kept
    groups = {f"length_le_{edge}": (response > low) & (response <= edge) for low, edge in pairwise((0, *LENGTH_EDGES))}
    groups[f"length_gt_{LENGTH_EDGES[-1]}"] = response > LENGTH_EDGES[-1]
    if facts.scores is not None:
        scores, there = facts.scores.double(), response > 0
        groups |= {"correct": there & (scores > 0), "wrong": there & (scores <= 0)}
        for name, rows in (("kept", kept > 0), ("rejected", there & (kept == 0))):
            splits[f"{name}_score_mean"] = Mean(scores * rows, rows)
    return splits | {f"kept_fraction_{name}": Mean(kept * rows, response * rows) for name, rows in groups.items()}


def log_ratio_histograms(ratio: LogRatio) -> Tensor:
    """Counts of log-ratios over tokens, of their sums over rows and of their means over rows, one behind the other."""
    of_rows = (log_ratio_histogram(logs, ratio.real) for logs in (ratio.sums, ratio.mean(ratio.sums)))
    return torch.cat([log_ratio_histogram(ratio.values, ratio.ones), *of_rows])
