"""Mergeable statistics: what some rows add up to, merged over micro-batches and ranks without loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Generic

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.histogram import NUM_BINS
from verl_rc.correction.log_ratio import SAFETY_BOUND, LogRatio, RowSums, row_sum
from verl_rc.correction.metrics import Numbers, correction_metrics
from verl_rc.correction.rejection import Means, Verdict, cause_means, exclusive_fractions, rule_totals
from verl_rc.correction.rows import RowContext
from verl_rc.correction.totals import FullTotals, Gap, Mean, Moments, T, Totals, map_totals
from verl_rc.correction.weights import Weights, shared_weights, weight_totals, with_prompts

NUM_AGES = NUM_TURNS = 5
"""Token ages (in updates) and turns are told apart up to the last of these, which stands for all later ones too."""
LENGTH_EDGES = (16, 64, 256, 1024, 4096, 16384)
"""Upper edges, in response tokens and inclusive, of the length buckets; the last bucket has none."""


@dataclass(frozen=True)
class CorrectionStatistics:
    """What was measured of some rows; the statistics of a batch are the merged ones of its parts.

    To merge over ranks: all-reduce ``sums`` with SUM and ``maxima`` with MAX, then ``with_vectors``.
    """

    sums: Tensor
    """float64: what adds up of ``Totals``, in the order of its fields; then, with full diagnostics, histograms of log-ratios
    over tokens, of their sums over rows and of their means over rows."""
    maxima: Tensor
    """float64: the extremes of ``Totals``."""
    layout: Totals[float]
    """The record itself, with 0 in place of every number."""

    @classmethod
    def from_rows(cls, rows: Totals[Tensor], histograms: Sequence[Tensor]) -> "CorrectionStatistics":
        """Statistics of what every row adds: columns ``[B]``."""
        sums: list[Tensor] = []
        maxima: list[Tensor] = []

        def put(column: Tensor, is_extreme: bool) -> float:
            (maxima if is_extreme else sums).append(column.double())
            return 0.0

        layout = map_totals(put, rows)
        # Over no rows at all the maximum is that of the padding: nothing seen.
        largest = pad(torch.stack(maxima), (0, 1), value=-torch.inf).amax(dim=1)
        return cls(torch.cat([torch.stack(sums).sum(dim=1), *histograms]), largest, layout)

    def totals(self) -> Totals[Tensor]:
        """The record with scalars that are still on their device."""
        return self._filled(self.sums.unbind(), self.maxima.unbind())[0]

    def numbers(self) -> Numbers:
        """Everything as Python numbers, read from the device in one copy."""
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


@dataclass(frozen=True)
class RowColumns(Generic[T]):
    """What is known of rows besides ``Totals`` once their tokens were seen: enough for everything that needs no token."""

    sums: RowSums
    train: T
    """Sum of the log-probs of the valid tokens under the train policy."""
    kept: T
    """Response tokens that are kept."""
    statistics: dict[str, T]
    """Of the ``seq_*`` rules, by name."""
    scores: T | None
    group_slots: T | None


def token_totals(
    ratio: LogRatio, verdict: Verdict, weights: Weights | None, settings: CorrectionSettings, context: RowContext
) -> Totals[Tensor]:
    """What every row adds as far as it needs the tokens."""
    rows, tokens = ratio.rows, ratio.rows.tokens
    excess, square = row_sum(ratio.excess), vecdot(ratio.excess, ratio.excess)
    means = cause_means(ratio, verdict, settings) | {
        "k3_kl": Mean((excess - row_sum(ratio.bounded)).clamp_min(0.0), tokens),  # rounding may leave a little below 0
        "chi2_token": Mean(square + 2.0 * excess, tokens),  # the sum of rho^2 - 1, exact near 0
        "safety_clamped_fraction": Mean(row_sum(ratio.holds(torch.ne, ratio.values, ratio.bounded)), tokens),
    }
    of_weights, of_rules, full = None, {}, None
    if settings.weights is not None and weights is not None and not settings.weights.is_per_row:
        of_weights, shares = weight_totals(weights, rows, settings.weights, ratio, full=settings.full)
        means |= shares
    for rule in settings.rules:
        if rule.rule.is_per_token:
            of_rules[rule.name], shares = rule_totals(rule, rows, ratio.divergence(rule.rule.divergence), ratio)
            means |= shares
    if settings.full:
        means["log_ratio_exact_fraction"] = Mean(ratio.count(torch.eq, ratio.values, 0.0), tokens)
        splits = exclusive_fractions(ratio, verdict) if settings.rejects else {}
        full = _full_totals(ratio, verdict, Moments(excess, tokens, square), context, splits)
    difference = -rows.mean(rows.log_ratio)
    return Totals(tokens, verdict.kept, verdict.kept > 0, means, rows.extremes(difference), of_weights, of_rules, full)


def _full_totals(
    ratio: LogRatio, verdict: Verdict, token_ratios: Moments[Tensor], context: RowContext, splits: Means
) -> FullTotals[Tensor]:
    mask = ratio.response.bool()
    ages = context.ages(mask)
    for name, compare in (("positive", torch.gt), ("negative", torch.lt)):
        if context.advantages is not None:
            found = ratio.holds(compare, context.advantages, 0.0).mul_(ratio.response)
            kept = row_sum(found if verdict.keep_tokens is None else found * verdict.keep_tokens)
            splits[f"kept_fraction_{name}_advantage"] = Mean(verdict.keep_rows * kept, row_sum(found))
    if ages is not None:
        splits["token_age_mean"] = Mean(row_sum(ages * ratio.ones), ratio.rows.tokens)
    begins = mask & ~pad(mask[:, :-1], (1, 0))  # a turn is a run of response tokens without a tool's between them
    product = torch.expm1(ratio.rows.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND))
    return FullTotals(
        log_ratio=ratio.extremes(ratio.values),
        token_ratios=token_ratios,
        row_ratios=Moments(product, ratio.rows.real, product.square()),
        turns=_gaps(ratio, begins.cumsum(dim=-1) - 1, NUM_TURNS),
        ages=() if ages is None else _gaps(ratio, ages, NUM_AGES),
        age=None if ages is None else ratio.extremes(ages),
        splits=splits,
    )


def _gaps(ratio: LogRatio, bucket: Tensor, buckets: int) -> tuple[Gap[Tensor], ...]:
    """The gap by ``bucket``, an integer ``[b, t]``; the last of them holds all that are beyond it."""
    places = bucket.clamp(0, buckets - 1)

    def by_bucket(values: Tensor) -> tuple[Tensor, ...]:
        sums = torch.zeros(len(values), buckets, dtype=torch.float64, device=values.device)
        return sums.scatter_add_(1, places, values.double()).unbind(dim=1)

    return tuple(map(Gap, *map(by_bucket, (ratio.ones, ratio.values, ratio.k3))))


def completed(totals: Totals[Tensor], columns: RowColumns[Tensor], settings: CorrectionSettings) -> Totals[Tensor]:
    """With what needs no token, computed for all rows at once: for a few at a time, calls would cost more than arithmetic."""
    rows, real, response, kept = columns.sums, columns.sums.real, columns.sums.response_tokens, columns.kept
    train, difference, any_response = rows.mean(columns.train), -rows.mean(rows.log_ratio), response.clamp_max(1.0)
    rollout = train + difference
    means = totals.means | {
        "training_ppl": Mean(real * (-train).exp(), real),
        "training_log_ppl": Mean(-train, real),  # log-perplexities are minus mean log-probs
        "rollout_ppl": Mean(real * (-rollout).exp(), real),
        "rollout_log_ppl": Mean(-rollout, real),
        "log_ppl_diff": Mean(difference, real),
        "log_ppl_abs_diff": Mean(difference.abs(), real),
        "ppl_ratio": Mean(real * difference.exp(), real),
        "chi2_seq": Mean(torch.expm1(2.0 * rows.log_ratio.clamp(-SAFETY_BOUND, SAFETY_BOUND)), real),
        "kl": Mean(-rows.log_ratio, rows.tokens),
        "nonfinite_token_fraction": Mean(response - rows.tokens, response),
    }
    weights, rules, full = totals.weights, {}, totals.full
    if settings.weights is not None and settings.weights.is_per_row:
        weights, shares = weight_totals(shared_weights(rows, settings.weights), rows, settings.weights, None, full=settings.full)
        means |= shares
    if weights is not None and columns.group_slots is not None:
        weights = with_prompts(weights, columns.group_slots)
    for rule in settings.rules:
        if rule.rule.is_per_token:
            rules[rule.name] = totals.rules[rule.name]
        else:
            rules[rule.name], shares = rule_totals(rule, rows, columns.statistics[rule.name])
            means |= shares
    if settings.rejects:
        means |= {
            "rollout_rs_masked_fraction": Mean(response - kept, response),
            "rollout_rs_seq_masked_fraction": Mean(kept < response, any_response),
            "rollout_rs_seq_rejected_fraction": Mean(any_response * (kept == 0), any_response),
        }
    if full is not None:
        means["safety_clamped_seq_fraction"] = Mean(rows.log_ratio.abs() > SAFETY_BOUND, real)
        full = replace(full, splits=full.splits | _kept_splits(response, kept, columns.scores))
    return replace(totals, means=means, weights=weights, rules=rules, full=full)


def _kept_splits(response: Tensor, kept: Tensor, scores: Tensor | None) -> Means:
    """Share of tokens kept by length of the response and by correctness; scores of kept and of rejected rows."""
    groups = {f"length_le_{edge}": (response > low) & (response <= edge) for low, edge in pairwise((0, *LENGTH_EDGES))}
    groups[f"length_gt_{LENGTH_EDGES[-1]}"] = response > LENGTH_EDGES[-1]
    splits = {}
    if scores is not None:
        scores, there = scores.detach().double(), response > 0
        groups |= {"correct": there & (scores > 0), "wrong": there & (scores <= 0)}
        for name, rows in (("kept", kept > 0), ("rejected", there & (kept == 0))):
            splits[f"{name}_score_mean"] = Mean(scores * rows, rows)
    return splits | {f"kept_fraction_{name}": Mean(kept * rows, response * rows) for name, rows in groups.items()}
