"""Mergeable statistics: sums over sequences that are added over micro-batches and ranks without loss."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig
from verl_rc.correction.histogram import NUM_BINS, log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, sequence_sum
from verl_rc.correction.metrics import Numbers, correction_metrics
from verl_rc.correction.rejection import (
    Rejection,
    exclusive_fractions,
    rejection_means,
    rule_statistic,
    rule_totals,
)
from verl_rc.correction.sequences import LogProbs, SequenceContext
from verl_rc.correction.signatures import head_sums, signature_metrics, signature_sums
from verl_rc.correction.totals import (
    AgeTotals,
    FullTotals,
    Gap,
    Means,
    RuleSums,
    SequenceSums,
    TokenSums,
    Totals,
    map_totals,
)
from verl_rc.correction.weights import (
    Weights,
    sums_of_tokens,
    token_weight_means,
    weight_totals,
    with_prompts,
)
from verl_rc.metrics.mean import Mean, Moments
from verl_rc.tensor_ops import LOG_RATIO_BOUND, bound_log_ratio

NUM_AGES = NUM_TURNS = 5
"""Ages and turns are told apart up to the last of these, which stands for all above it, too."""
LENGTH_EDGES = (16, 64, 256, 1024, 4096, 16384)
"""Upper edges, in response tokens and inclusive, of the length buckets; the last bucket has none."""


@dataclass(frozen=True)
class CorrectionStatistics:
    """What was measured of some sequences; the statistics of a batch are the merged ones of its parts.

    To merge over ranks: all-reduce ``sums`` with SUM and ``maxima`` with MAX, then ``with_vectors``.
    """

    sums: Tensor
    """float64: what adds up of ``Totals``, in the order of its fields; then, if any, the histograms of
    ``Numbers``."""
    maxima: Tensor
    """float64: the extremes of ``Totals``."""
    layout: Totals[float]
    """The record itself, with 0 in place of every number."""

    @classmethod
    def from_sequences(
        cls, sequences: Totals[Tensor], histograms: Sequence[Tensor]
    ) -> "CorrectionStatistics":
        """Statistics of what every sequence adds: columns ``[B]``."""
        sums: list[Tensor] = []
        maxima: list[Tensor] = []

        def put(column: Tensor, is_extreme: bool) -> float:
            (maxima if is_extreme else sums).append(column.double())
            return 0.0

        # float64 also for counts: float32 would stop counting tokens at 16 million.
        layout = map_totals(put, sequences)
        # Over no sequences at all the maximum is that of the padding: nothing seen.
        largest = pad(torch.stack(maxima), (0, 1), value=-torch.inf).amax(dim=1)
        return cls(torch.cat([torch.stack(sums).sum(dim=1), *histograms]), largest, layout)

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
        return Numbers(
            totals, [counts[start : start + NUM_BINS] for start in range(0, len(counts), NUM_BINS)]
        )

    def _filled(self, sums: Sequence[Any], maxima: Sequence[Any]) -> tuple[Totals[Any], list[Any]]:
        added, extremes = iter(sums), iter(maxima)
        return map_totals(lambda _, is_extreme: next(extremes if is_extreme else added), self.layout), list(
            added
        )

    @property
    def k3_kl(self) -> float:
        """``rollout_corr/k3_kl``: the k3 estimate of KL(rollout || train), nats per token."""
        return self.numbers().totals.gap.mean_k3

    @property
    def nonfinite_fraction(self) -> float:
        """``rollout_corr/nonfinite_token_fraction``: share of the response tokens."""
        return self.numbers().totals.nonfinite_fraction

    def metrics(self, config: RolloutCorrectionConfig) -> dict[str, float]:
        """``rollout_corr/*`` of the sequences measured, by name; one copy from the device."""
        return correction_metrics(self.numbers(), config.settings())

    def signatures(self) -> dict[str, float]:
        """Return those of ``metrics`` that tell causes apart; only where the trainer's weights were those
        before any update."""
        full, histograms = self.numbers().totals.full, self.numbers().histograms
        assert full is not None
        assert full.signatures is not None
        assert full.head is not None
        return {
            f"rollout_corr/{name}": n
            for name, n in signature_metrics(full.signatures, full.head, histograms[0]).items()
        }

    def merge(self, other: "CorrectionStatistics") -> "CorrectionStatistics":
        """Statistics of both parts together. Raises ``ValueError`` unless the same was measured of both."""
        # Compared as text: dictionaries in different orders are equal, but their numbers stand at different
        # places.
        if repr(self.layout) != repr(other.layout):
            raise ValueError(
                "statistics merge only when one configuration measured both, knowing the same facts about "
                f"rows; got {sorted(self.layout.means)} and {sorted(other.layout.means)}"
            )
        return self.with_vectors(self.sums + other.sums, torch.maximum(self.maxima, other.maxima))

    def with_vectors(self, sums: Tensor, maxima: Tensor) -> "CorrectionStatistics":
        """Return the same statistics with other numbers: after a reduction, or on another device."""
        return replace(self, sums=sums, maxima=maxima)


def token_sums(
    ratio: LogRatio,
    rejection: Rejection,
    rules: dict[str, RuleSums],
    weights: Weights | None,
    settings: CorrectionSettings,
    facts: SequenceContext,
) -> TokenSums:
    """What the tokens of some sequences ``[b]`` add up to; ``rules`` is what those on tokens found."""
    sums, veto, age, of_weights, raw_weight, full = ratio.sums, None, None, list[Any](), None, None
    means = {
        "safety_clamped_fraction": Mean(
            ratio.count(indicator(torch.ne, ratio.values, ratio.bounded)), sums.tokens
        )
    }
    if settings.log_veto is not None:
        # Unbounded log-ratios are compared: a veto may lie beyond the safety bound.
        veto = ratio.count(indicator(torch.lt, ratio.values, settings.log_veto))
    if settings.opsm_threshold is not None:
        rejected, response = sequence_sum(rejection.causes["opsm"]), sums.response_tokens
        means["rollout_rs_opsm_masked_fraction"] = Mean(rejected, response)
        means["rollout_rs_opsm_seq_masked_fraction"] = Mean(rejected > 0, response.clamp_max(1.0))
    if settings.weights is not None and weights is not None and not settings.weights.is_per_row:
        means |= token_weight_means(weights, settings.weights.threshold, ratio)
        raw_weight = sums.mean(sequence_sum(weights.raw_excess))
        measured = (weights.excess, weights.raw_excess) if settings.full else (weights.excess,)
        of_weights = [sums_of_tokens(excess, ratio.ones, sums.tokens) for excess in measured]
    if (ages := facts.ages(ratio.response)) is not None:
        age = extremes(ages, ratio.ones)
        means["token_age_mean"] = Mean(sequence_sum(ages * ratio.ones), sums.tokens)
    if settings.full:
        means["log_ratio_exact_fraction"] = Mean(
            ratio.count(indicator(torch.eq, ratio.values, 0.0)), sums.tokens
        )
        full = _full_token_sums(ratio, rejection, facts)
    return TokenSums(
        sums=sums,
        # Sums of both terms instead of a sum of k3: one pass less; rounding may leave a little below 0.
        gap=Gap(
            sums.tokens, sums.log_ratio, (ratio.ratios.total - sequence_sum(ratio.precise)).clamp_min(0.0)
        ),
        train=sequence_sum(ratio.train),
        ratios=ratio.ratios,
        kept=rejection.kept.sum(dim=-1).double() if rejection.causes else sums.response_tokens,
        below_veto=veto,
        statistics={
            rule.name: rule_statistic(rule.rule, ratio)
            for rule in settings.rules
            if not rule.rule.is_per_token
        },
        means=means,
        rules=rules,
        weights=tuple(of_weights),
        raw_weight=raw_weight,
        ages=() if ages is None else tuple(_by_age(ratio, ages, rejection, weights)),
        age=age,
        full=full,
        alone={name: sequence_sum(alone) for name, alone in rejection.alone.items()} if settings.full else {},
    )


def _by_age(
    ratio: LogRatio, ages: Tensor, rejection: Rejection, weights: Weights | None
) -> Iterator[AgeTotals[Tensor]]:
    """Yield totals by age; ``ages``, int64 ``[b, t]``, are updates between the weights that sampled a token
    and the current ones.

    The gap grows with age, but the mean ratio before truncation is 1 at every age: where it is not, versions
    are wrong.
    """
    for here in _buckets(ages, NUM_AGES):
        # Rejected of response tokens, the rest of valid tokens: one without a finite log-prob has no gap and
        # no weight.
        ones, response, of_weights, truncated = (
            here * ratio.ones,
            sequence_sum(here * ratio.response),
            None,
            None,
        )
        gap = _gap(ratio, ones)
        if weights is not None:
            # Where all tokens of a sequence share a weight, each of them counts with it.
            raw, excess = (w if w.ndim == 2 else w[:, None] for w in (weights.raw_excess, weights.excess))
            of_weights, truncated = (
                sums_of_tokens(excess * ones, ones, gap.tokens),
                sequence_sum((raw != excess) * ones),
            )
        yield AgeTotals(
            gap, Mean(response - sequence_sum(rejection.kept * here), response), of_weights, truncated
        )


def _full_token_sums(ratio: LogRatio, rejection: Rejection, facts: SequenceContext) -> FullTotals[Tensor]:
    """Return the totals without what is known of whole sequences only."""
    mask, signs = ratio.response.bool(), dict[str, Mean[Tensor]]()
    begins = mask & ~pad(
        mask[:, :-1], (1, 0)
    )  # a turn is a run of response tokens without a tool's between them
    turns = tuple(_gap(ratio, here * ratio.ones) for here in _buckets(begins.cumsum(dim=-1) - 1, NUM_TURNS))
    if facts.advantages is not None:
        for name, some in (("positive", facts.advantages > 0), ("negative", facts.advantages < 0)):
            kept = sequence_sum(some * rejection.kept)
            signs[f"kept_fraction_{name}_advantage"] = Mean(kept, sequence_sum(some * ratio.response))
    product = torch.expm1(bound_log_ratio(ratio.sums.log_ratio))
    products = Moments(product, ratio.sums.real, product.square())
    return FullTotals(extremes(ratio.values, ratio.ones), ratio.ratios, products, turns, signs)


def _buckets(numbers: Tensor, count: int) -> Iterator[Tensor]:
    """Yield for each of ``count`` buckets float64 ``[b, t]``: 1 where integers fall into it; the last takes
    all above."""
    # One after the other and not as one tensor with a dimension more, so that temporaries stay small.
    for bucket in range(count):
        yield (numbers.clamp(0, count - 1) == bucket).double()


def _gap(ratio: LogRatio, ones: Tensor) -> Gap[Tensor]:
    """How far the policies are apart on the valid tokens where ``ones``, float64 ``[b, t]``, is 1 and not
    0."""
    return Gap(sequence_sum(ones), sequence_sum(ratio.values * ones), vecdot(ratio.k3, ones))


def sequence_totals(
    found: TokenSums,
    rejection: Rejection,
    settings: CorrectionSettings,
    facts: SequenceContext,
    log_probs: LogProbs,
) -> Totals[Tensor]:
    """What every sequence ``[B]`` adds to the statistics, from what its tokens add up to."""
    sums, kept, weights, rules, full = (
        found.sums,
        rejection.kept * found.kept,
        None,
        dict[str, Any](),
        found.full,
    )
    means = found.means | _gap_means(found) | rejection_means(found, kept, settings)
    # Tokens of an age that are kept by themselves are rejected with their sequences.
    rejected = [
        age.rejected.count - rejection.kept * (age.rejected.count - age.rejected.total) for age in found.ages
    ]
    ages = [
        replace(age, rejected=Mean(n, age.rejected.count))
        for age, n in zip(found.ages, rejected, strict=True)
    ]
    if settings.weights is not None:
        weights, shares = weight_totals(found, settings.weights)
        weights = weights if facts.group_slots is None else with_prompts(weights, facts.group_slots)
        means |= shares
    for rule in settings.rules:
        rules[rule.name], shares = rule_totals(rule, found)
        means |= shares
    if full is not None:
        means["safety_clamped_seq_fraction"] = Mean(sums.log_ratio.abs() > LOG_RATIO_BOUND, sums.real)
        splits = {name: Mean(rejection.kept * sign.total, sign.count) for name, sign in full.splits.items()}
        splits |= exclusive_fractions(found, rejection) if settings.rejects else {}
        full = replace(full, splits=splits | _splits(sums.response_tokens, kept, facts.scores))
        if settings.tests_misalignment:
            # Few positions of all sequences at once: operations on those of a chunk would take as long as
            # these.
            full = replace(
                full, signatures=signature_sums(log_probs, facts, found.ratios), head=head_sums(log_probs)
            )
    difference, response = extremes(-sums.mean(sums.log_ratio), sums.tokens), sums.response_tokens
    return Totals(
        found.gap, response, kept, kept > 0, means, difference, weights, rules, tuple(ages), found.age, full
    )


def _gap_means(found: TokenSums) -> Means[Tensor]:
    """How far the policies are apart, before any weight or rule."""
    sums, tokens, real = found.sums, found.sums.tokens, found.sums.real
    train, difference = sums.mean(found.train), -sums.mean(sums.log_ratio)
    rollout = train + difference
    return {
        "training_ppl": Mean(real * (-train).exp(), real),
        "training_log_ppl": Mean(-train, real),  # log-perplexities are minus mean log-probs
        "rollout_ppl": Mean(real * (-rollout).exp(), real),
        "rollout_log_ppl": Mean(-rollout, real),
        "log_ppl_diff": Mean(difference, real),
        "log_ppl_abs_diff": Mean(difference.abs(), real),
        "ppl_ratio": Mean(real * difference.exp(), real),
        # rho^2 - 1 from rho - 1: exact near 0, and no second exponential.
        "chi2_token": Mean(found.ratios.square + 2.0 * found.ratios.total, tokens),
        "chi2_seq": Mean(torch.expm1(2.0 * bound_log_ratio(sums.log_ratio)), real),
    }


def _splits(response: Tensor, kept: Tensor, scores: Tensor | None) -> Means[Tensor]:
    """Share of tokens kept by length of the response and by correctness; scores of kept and of rejected
    sequences."""
    splits = dict[str, Mean[Tensor]]()
    groups = {
        f"length_le_{edge}": (response > low) & (response <= edge)
        for low, edge in pairwise((0, *LENGTH_EDGES))
    }
    groups[f"length_gt_{LENGTH_EDGES[-1]}"] = response > LENGTH_EDGES[-1]
    if scores is not None:
        scores, there = scores.double(), response > 0
        groups |= {"correct": there & (scores > 0), "wrong": there & (scores <= 0)}
        for name, some in (("kept", kept > 0), ("rejected", there & (kept == 0))):
            splits[f"{name}_score_mean"] = Mean(scores * some, some)
    return splits | {
        f"kept_fraction_{name}": Mean(kept * some, response * some) for name, some in groups.items()
    }


def sequence_histograms(sums: SequenceSums) -> list[Tensor]:
    """Counts of the log-ratios of sequences, and of their means over tokens."""
    return [log_ratio_histogram(logs, sums.real) for logs in (sums.log_ratio, sums.mean(sums.log_ratio))]
