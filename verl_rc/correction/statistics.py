"""Mergeable statistics: sums over sequences that are added over micro-batches and ranks without loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vecdot
from torch.nn.functional import pad

from verl_rc.config.rejection_rules import BoundedRule
from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig, WeightSettings
from verl_rc.correction.histogram import log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio, extremes, indicator, moments, sequence_sum
from verl_rc.correction.metrics import Numbers, correction_metrics
from verl_rc.correction.rejection import Rejection, outside, row_statistics
from verl_rc.correction.sequences import LogProbs, SequenceContext
from verl_rc.correction.signatures import signature_sums
from verl_rc.correction.totals import (
    Means,
    RuleSums,
    RuleTotals,
    SequenceSums,
    TokenSums,
    Totals,
    WeightSums,
    map_totals,
)
from verl_rc.correction.weights import Weights
from verl_rc.metrics.log_ratio_bins import NUM_BINS
from verl_rc.metrics.mergeable import Extremes, Mean
from verl_rc.metrics.signatures import signature_metrics
from verl_rc.metrics.splits import ANSWERS, NUM_AGES, NUM_TURNS, SIGNS
from verl_rc.tensor_ops import bound_log_ratio


@dataclass(frozen=True)
class CorrectionStatistics:
    """Statistics of some sequences; those of a batch are the merged ones of its parts.

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

        def append(column: Tensor, is_extreme: bool) -> float:
            (maxima if is_extreme else sums).append(column.double())
            return 0.0

        # float64 also for counts: float32 would stop counting tokens at 16 million.
        layout = map_totals(append, sequences)
        # Over no sequences at all the maximum is that of the padding: no value.
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
        return self.numbers().totals.means["k3_kl"].value

    @property
    def nonfinite_fraction(self) -> float:
        """``rollout_corr/nonfinite_token_fraction``: share of the response tokens."""
        return self.numbers().totals.means["nonfinite_token_fraction"].value

    def metrics(self, config: RolloutCorrectionConfig) -> dict[str, float]:
        """``rollout_corr/*`` of the sequences measured, by name; one copy from the device."""
        return correction_metrics(self.numbers(), config.settings())

    def signatures(self) -> dict[str, float]:
        """Return those of ``metrics`` that tell causes apart; only where the trainer's weights were those
        before any update."""
        signatures, histograms = self.numbers().totals.signatures, self.numbers().histograms
        assert signatures is not None
        return {f"rollout_corr/{name}": n for name, n in signature_metrics(signatures, histograms[0]).items()}

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


def measure_tokens(
    ratio: LogRatio,
    weights: Weights | None,
    rejection: Rejection,
    context: SequenceContext,
    settings: CorrectionSettings,
) -> TokenSums:
    """What the tokens of a chunk add up to; ``rejection`` is that of tokens by themselves."""
    sums, totals = ratio.sums, Totals[Tensor]()
    row_weights = {} if weights is None else _measure_token_weights(totals, weights, ratio, settings)
    clamped = indicator(torch.ne, ratio.values, ratio.bounded).sum(dim=-1).double()
    totals.means["safety_clamped_fraction"] = Mean(clamped, sums.tokens)
    if settings.opsm_threshold is not None:
        masked = sequence_sum(rejection.causes["opsm"])
        share = Mean((masked > 0).double(), sums.response_rows)
        totals.means["rollout_rs_opsm_masked_fraction"] = Mean(masked, sums.response_tokens)
        totals.means["rollout_rs_opsm_seq_masked_fraction"] = share
    tokens = TokenSums(
        sequences=sums,
        kept_tokens=rejection.kept.sum(dim=-1).double() if rejection.causes else sums.response_tokens,
        train=sequence_sum(ratio.train),
        bounded=sequence_sum(ratio.precise),
        ratios=moments(ratio.excess, sums.tokens),
        rules=rejection.rules,
        row_weights=row_weights,
        totals=totals,
        row_statistics=row_statistics(ratio, settings),  # last: the divergences of rules stay alive
    )
    if (ages := context.ages(ratio.response)) is not None:
        _measure_ages(tokens, ages, ratio, rejection)
    if settings.full:
        _measure_turns_and_signs(tokens, ratio, rejection, context.advantages)
    return tokens


def _measure_token_weights(
    totals: Totals[Tensor], weights: Weights, ratio: LogRatio, settings: CorrectionSettings
) -> dict[str, Tensor]:
    """Add the weights of tokens where each has its own; return ``TokenSums.row_weights``."""
    sums = ratio.sums
    if settings.weights is None or settings.weights.is_per_row:
        return {"applied": weights.excess, "raw": weights.raw_excess}
    # Logarithms are compared, not weights: they are known beyond the safety bound, too.
    threshold = settings.weights.threshold
    high = ratio.count(indicator(torch.gt, weights.logs, math.log(threshold.upper)))
    low = ratio.count(indicator(torch.lt, weights.logs, math.log(threshold.reciprocal_lower)))
    totals.means["rollout_is_ratio_fraction_high"] = Mean(high, sums.tokens)
    totals.means["rollout_is_ratio_fraction_low"] = Mean(low, sums.tokens)
    if threshold.lower is not None:
        totals.means["rollout_is_oob_ratio"] = Mean(high + low, sums.tokens)
    applied = _weights_of_tokens(weights.excess, ratio.valid, sums.tokens)
    totals.weights["applied_token"] = applied
    if settings.full:
        totals.weights["raw_token"] = _weights_of_tokens(weights.raw_excess, ratio.valid, sums.tokens)
    raw = totals.weights["raw_token"].excess.total if settings.full else sequence_sum(weights.raw_excess)
    return {"applied": sums.mean(applied.excess.total), "raw": sums.mean(raw)}


def _weights_of_tokens(excess: Tensor, members: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds. ``excess`` is ``w - 1`` of the ``count`` tokens where ``members`` is 1, and 0
    where it is 0."""
    w = excess + members
    # The extremes are those of weights as they are applied: in float32 where log-probs are, at half the cost.
    return WeightSums(moments(excess, count), vecdot(w, w), extremes(w.to(members.dtype), members))


def _measure_ages(tokens: TokenSums, ages: Tensor, ratio: LogRatio, rejection: Rejection) -> None:
    """Add what tokens of each age add up to; ``ages``, int64 ``[b, t]``, are steps between the weights that
    sampled a token and the current ones."""
    totals = tokens.totals
    totals.means["token_age_mean"] = Mean(sequence_sum(ages * ratio.valid), ratio.sums.tokens)
    for age, bucket in enumerate(_buckets(ages, NUM_AGES)):
        totals.splits[f"age_{age}_k3_kl"] = _k3(ratio, bucket * ratio.valid)
        # Kept are response tokens; those without a finite log-prob have no gap.
        tokens.kept[f"age_{age}"] = Mean(
            sequence_sum(rejection.kept * bucket), sequence_sum(bucket * ratio.response)
        )


def _measure_turns_and_signs(
    tokens: TokenSums, ratio: LogRatio, rejection: Rejection, advantages: Tensor | None
) -> None:
    """Add what tokens of each turn, and of each sign of the advantage, add up to."""
    for turn, bucket in enumerate(_buckets(ratio.turns, NUM_TURNS)):
        tokens.totals.splits[f"turn_{turn}_k3_kl"] = _k3(ratio, bucket.mul_(ratio.valid))
    if advantages is not None:
        for name, sign in zip(SIGNS, (advantages > 0, advantages < 0), strict=True):
            kept, response = sequence_sum(sign * rejection.kept), sequence_sum(sign * ratio.response)
            tokens.kept[name] = Mean(kept, response)


def _buckets(numbers: Tensor, count: int) -> Iterator[Tensor]:
    """Yield for each of ``count`` buckets float64 ``[b, t]``: 1 where integers fall into it; the last takes
    all above."""
    # One after the other and not as one tensor with a dimension more, so that temporaries stay small.
    for bucket in range(count):
        yield (numbers.clamp(0, count - 1) == bucket).double()


def _k3(ratio: LogRatio, members: Tensor) -> Mean[Tensor]:
    """The mean of k3 over the valid tokens where ``members``, float64 ``[b, t]``, is 1 and not 0."""
    return Mean(vecdot(ratio.k3, members), sequence_sum(members))


def measure_sequences(
    tokens: TokenSums,
    rejection: Rejection,
    settings: CorrectionSettings,
    context: SequenceContext,
    log_probs: LogProbs,
    histogram: Tensor,
) -> CorrectionStatistics:
    """Statistics of all sequences ``[B]``, before any rejection.

    ``rejection`` is that of whole sequences, ``histogram`` that of the tokens' log-ratios, which full
    diagnostics have.
    """
    sums, totals = tokens.sequences, tokens.totals
    kept = rejection.kept * tokens.kept_tokens
    totals.means.update(_gap_means(tokens) | _rejection_means(tokens, kept, settings))
    totals.unreported["distance"] = Mean(sums.distance, sums.tokens)
    totals.unreported["kept_tokens"] = Mean(kept, sums.response_tokens)
    totals.unreported["kept_rows"] = Mean((kept > 0).double(), sums.response_rows)
    totals.extremes["distance"] = Extremes(sums.farthest, sums.farthest)
    totals.extremes["log_ppl_diff"] = extremes(-sums.mean(sums.log_ratio), sums.tokens)
    if settings.weights is not None:
        groups = context.group_slots if settings.full else None
        _measure_weights(totals, sums, tokens.row_weights, settings.weights, groups)
    rules = tokens.rules | rejection.rules
    for rule in settings.rules:
        _measure_rule(totals, rule, rules[rule.name], sums)
    for name, group in tokens.kept.items():
        # A token that is kept by itself may be rejected with its sequence.
        kept_ones = rejection.kept * group.total
        if name in SIGNS:
            totals.splits[f"kept_fraction_{name}"] = Mean(kept_ones, group.count)
        else:
            totals.splits[f"{name}_rejected_fraction"] = Mean(group.count - kept_ones, group.count)
    if not settings.full:
        return CorrectionStatistics.from_sequences(totals, [])
    if context.scores is not None:
        totals.splits.update(_by_score(sums.response_tokens, kept, context.scores.double()))
    if settings.tests_misalignment:
        signatures = signature_sums(log_probs, context, tokens.ratios)
        totals = replace(totals, ratios=tokens.ratios, signatures=signatures)
    levels = (sums.log_ratio, sums.mean(sums.log_ratio))
    histograms = [histogram, *(log_ratio_histogram(logs, sums.valid_rows) for logs in levels)]
    return CorrectionStatistics.from_sequences(totals, histograms)


def _gap_means(tokens: TokenSums) -> Means[Tensor]:
    """How far the policies are apart, before any weight or rule."""
    sums, ratios = tokens.sequences, tokens.ratios
    rows, response = sums.valid_rows, sums.response_tokens
    train, difference = sums.mean(tokens.train), -sums.mean(sums.log_ratio)
    rollout = train + difference
    return {
        "kl": Mean(-sums.log_ratio, sums.tokens),
        # Sums of both terms instead of a sum of k3: one pass less; rounding may leave a little below 0.
        "k3_kl": Mean((ratios.total - tokens.bounded).clamp_min(0.0), sums.tokens),
        "nonfinite_token_fraction": Mean(response - sums.tokens, response),
        "training_ppl": Mean(rows * (-train).exp(), rows),
        "training_log_ppl": Mean(-train, rows),  # log-perplexities are minus mean log-probs
        "rollout_ppl": Mean(rows * (-rollout).exp(), rows),
        "rollout_log_ppl": Mean(-rollout, rows),
        "log_ppl_diff": Mean(difference, rows),
        "log_ppl_abs_diff": Mean(difference.abs(), rows),
        "ppl_ratio": Mean(rows * difference.exp(), rows),
        # rho^2 - 1 from rho - 1: exact near 0, and no second exponential.
        "chi2_token": Mean(ratios.square + 2.0 * ratios.total, sums.tokens),
        "chi2_seq": Mean(torch.expm1(2.0 * bound_log_ratio(sums.log_ratio)), rows),
    }


def _rejection_means(tokens: TokenSums, kept: Tensor, settings: CorrectionSettings) -> Means[Tensor]:
    """Shares of tokens and sequences that are rejected, by any cause and by the veto; ``kept`` ``[B]``:
    number of tokens that are not."""
    means, sums = dict[str, Mean[Tensor]](), tokens.sequences
    rows, response = sums.response_rows, sums.response_tokens
    if settings.rejects:
        means |= {
            "rollout_rs_masked_fraction": Mean(response - kept, response),
            "rollout_rs_seq_masked_fraction": Mean(kept < response, rows),
            "rollout_rs_seq_rejected_fraction": Mean(rows * (kept == 0), rows),
        }
    if settings.log_veto is not None:
        count = tokens.row_statistics["veto"]
        means |= {
            "rollout_is_veto_fraction": Mean(count.clamp_max(1.0), sums.valid_rows),
            "rollout_is_catastrophic_token_fraction": Mean(count, sums.tokens),
        }
    return means


def _measure_weights(
    totals: Totals[Tensor],
    sums: SequenceSums,
    excesses: dict[str, Tensor],
    settings: WeightSettings,
    group_slots: Tensor | None,
) -> None:
    """Add the weights of sequences and prompts, and shares of those beyond the threshold.

    A sequence's weight is the mean over its tokens, a prompt's the mean over its sequences with valid tokens.
    """
    weights, means, bounds = totals.weights, totals.means, settings.threshold
    for kind, excess in excesses.items():
        if settings.is_per_row:
            weights[f"{kind}_token"] = _weights_of_rows(excess, sums.tokens)
        if f"{kind}_token" not in weights:
            continue  # raw ones, without full diagnostics
        weights[f"{kind}_sequence"] = sequences = _weights_of_rows(excess, sums.valid_rows)
        if group_slots is not None:
            total, count = (
                torch.zeros_like(column).index_add_(0, group_slots, column)
                for column in (sequences.excess.total, sequences.excess.count)
            )
            mean = Mean(total, count).value
            weights[f"{kind}_prompt"] = _weights_of_rows(mean, count.clamp_max(1.0))
    high = sums.valid_rows * (excesses["raw"] > bounds.upper - 1.0)
    low = sums.valid_rows * (excesses["raw"] < bounds.reciprocal_lower - 1.0)
    for level in ("seq", "ratio") if settings.is_per_row else ("seq",):
        means |= {
            f"rollout_is_{level}_fraction_high": Mean(high, sums.valid_rows),
            f"rollout_is_{level}_fraction_low": Mean(low, sums.valid_rows),
        }
    if settings.is_per_row and bounds.lower is not None:
        means["rollout_is_oob_ratio"] = Mean(sums.tokens * (high + low), sums.tokens)


def _weights_of_rows(excess: Tensor, count: Tensor) -> WeightSums[Tensor]:
    """What each sequence adds, with ``w - 1 = excess`` ``[B]`` counted ``count`` ``[B]`` times."""
    w = excess + 1.0
    return WeightSums(moments(excess, count), count * w.square(), extremes(w, count))


def _measure_rule(totals: Totals[Tensor], rule: BoundedRule, measured: RuleSums, sums: SequenceSums) -> None:
    """Add what every sequence adds to the statistics of a rule, and to the metrics that are means or
    shares."""
    rows, tokens, mean = sums.valid_rows, sums.tokens, measured.mean
    above, below = measured.above, measured.below
    count, rejected = (rows, tokens * (above + below)) if rule.rule.rejects_rows else (tokens, above + below)
    seq_above, seq_below = (rows * side for side in outside(rule, mean))
    if rule.rule.bounds_ratio:  # k1 is minus the log-ratio: where it is small, the ratio is high
        above, below, seq_above, seq_below = below, above, seq_below, seq_above
    means = {
        "mean": Mean(measured.total, tokens),
        "masked_fraction": Mean(rejected, tokens),
        "seq_masked_fraction": Mean(rejected > 0, rows),
        "fraction_high": Mean(above, count),
        "fraction_low": Mean(below, count),
        "seq_fraction_high": Mean(seq_above, rows),
    }
    means |= {"seq_fraction_low": Mean(seq_below, rows)} if rule.rule.bounds_ratio else {}
    totals.means.update({f"rollout_rs_{rule.name}_{name}": share for name, share in means.items()})
    totals.rules[rule.name] = RuleTotals(
        measured.clamped, measured.extremes, moments(mean, rows), extremes(mean, tokens)
    )


def _by_score(response: Tensor, kept: Tensor, scores: Tensor) -> Means[Tensor]:
    """Share of the tokens kept of right and of wrong sequences; scores of kept and of rejected sequences."""
    answered = response > 0
    answers = dict(zip(ANSWERS, (answered & (scores > 0), answered & (scores <= 0)), strict=True))
    shares = {
        f"kept_fraction_{name}": Mean(kept * members, response * members) for name, members in answers.items()
    }
    fates = {"kept": kept > 0, "rejected": answered & (kept == 0)}
    return shares | {f"{name}_score_mean": Mean(scores * members, members) for name, members in fates.items()}
