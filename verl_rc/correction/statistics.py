"""Statistics of some sequences: masked sums over ``[B, T]`` that merge over parts, micro-batches and ranks
without loss."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import BoundedRule
from verl_rc.config.rollout_correction import CorrectionSettings, RolloutCorrectionConfig, WeightSettings
from verl_rc.correction.context import SequenceContext
from verl_rc.correction.correct import Rejection, Weights
from verl_rc.correction.histogram import log_ratio_histogram
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.correction.metrics import SMALLEST_NORMALISER, Numbers, correction_metrics
from verl_rc.correction.signatures import signature_sums
from verl_rc.correction.totals import RuleTotals, Totals, WeightSums, map_numbers
from verl_rc.metrics.log_ratio_bins import NUM_BINS
from verl_rc.metrics.mergeable import Extremes, Mean, Moments
from verl_rc.metrics.signatures import signature_metrics
from verl_rc.metrics.splits import ANSWERS, NUM_AGES, NUM_TURNS, SIGNS
from verl_rc.tensor_ops import LOG_RATIO_BOUND, bound_log_ratio


@dataclass(frozen=True)
class CorrectionStatistics:
    """Statistics of some sequences; those of a batch are the merged ones of its parts.

    To merge over ranks: all-reduce ``sums`` with SUM and ``maxima`` with MAX, then ``with_vectors``.
    """

    sums: Tensor
    """float64: the sums of ``Totals``, in the order of its fields; then, if any, the histograms of
    ``Numbers``."""
    maxima: Tensor
    """float64: the extremes of ``Totals``."""
    layout: Totals[float]
    """The record itself, with 0 in place of every number."""

    @classmethod
    def from_totals(cls, totals: Totals[Tensor], histograms: Sequence[Tensor]) -> "CorrectionStatistics":
        """Statistics of scalars on one device."""
        sums: list[Tensor] = []
        maxima: list[Tensor] = []

        def append(number: Tensor, is_extreme: bool) -> float:
            (maxima if is_extreme else sums).append(number.double())
            return 0.0

        layout = map_numbers(append, totals)
        return cls(torch.cat([torch.stack(sums), *histograms]), torch.stack(maxima), layout)

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
        totals = map_numbers(lambda _, is_extreme: next(extremes if is_extreme else added), self.layout)
        return totals, list(added)

    def mean_weight(self, settings: WeightSettings) -> Tensor:
        """The divisor of batch normalisation, a scalar still on its device:
        ``rollout_is_batch_norm_factor``."""
        totals, _ = self._filled(self.sums.unbind(), self.maxima.unbind())
        mean = 1.0 + totals.weights[f"applied_{'sequence' if settings.is_per_row else 'token'}"].excess.value
        return torch.where(mean > SMALLEST_NORMALISER, mean, 1.0)

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

    def with_prompts(
        self, row_weights: dict[str, Tensor], rows: Tensor, group_slots: Tensor
    ) -> "CorrectionStatistics":
        """Add the weights of prompts: the mean over the sequences of each.

        ``row_weights`` are those of all sequences ``[B]``, applied and raw, and ``rows``, bool ``[B]``, are
        those with valid tokens.
        """
        totals, rest = self._filled(self.sums.unbind(), self.maxima.unbind())
        count = torch.zeros_like(group_slots, dtype=torch.float64).index_add_(0, group_slots, rows.double())
        for kind, weights in row_weights.items():
            total = torch.zeros_like(count).index_add_(0, group_slots, torch.where(rows, weights, 0.0))
            totals.weights[f"{kind}_prompt"] = _weight_sums(total / count.clamp(min=1), count > 0)
        return CorrectionStatistics.from_totals(totals, [torch.stack(rest)] if rest else [])


# Over tokens: values are ``[b, t]``, 0 where no token is valid, or ``[b, 1]``, of a sequence at each of its
# tokens. Over sequences: values are ``[b]``, members bool ``[b]``. Shares: all are bool.


def _token_sum(values: Tensor, ratio: LogRatio) -> Tensor:
    if values.shape == ratio.values.shape:
        return values.sum(dtype=torch.float64)
    return (values[:, 0] * ratio.lengths).sum()


def _token_mean(values: Tensor, ratio: LogRatio) -> Mean[Tensor]:
    return Mean(_token_sum(values, ratio), ratio.lengths.sum())


def _token_moments(values: Tensor, ratio: LogRatio) -> Moments[Tensor]:
    values = values.double()
    return Moments(_token_sum(values, ratio), ratio.lengths.sum(), _token_sum(values * values, ratio))


def _token_extremes(values: Tensor, ratio: LogRatio) -> Extremes[Tensor]:
    return _extremes(
        values, ratio.valid if values.shape == ratio.values.shape else ratio.lengths[:, None] > 0
    )


def _mean(values: Tensor, members: Tensor) -> Mean[Tensor]:
    return Mean((values * members).sum(), members.count_nonzero())


def _moments(values: Tensor, members: Tensor) -> Moments[Tensor]:
    values = values * members
    return Moments(values.sum(), members.count_nonzero(), values.square().sum())


def _extremes(values: Tensor, members: Tensor) -> Extremes[Tensor]:
    if not values.numel():
        nothing = torch.full((), -torch.inf, dtype=torch.float64, device=values.device)
        return Extremes(nothing, nothing)
    excluded = torch.where(members, 0.0, -torch.inf)
    return Extremes((excluded + values).amax().double(), (excluded - values).amax().double())


def _share(part: Tensor, whole: Tensor) -> Mean[Tensor]:
    return Mean((part & whole).count_nonzero(), whole.count_nonzero())


def measure_rows(
    ratio: LogRatio,
    weights: Weights | None,
    rejection: Rejection,
    context: SequenceContext,
    settings: CorrectionSettings,
) -> CorrectionStatistics:
    """Statistics of some sequences ``[b, t]``, before any rejection."""
    totals = Totals[Tensor]()
    totals.means.update(_gap(ratio) | _rejected(ratio, rejection, settings))
    totals.unreported["distance"] = _token_mean(ratio.values.abs(), ratio)
    totals.unreported["kept_tokens"] = _share(rejection.keep_mask, ratio.response)
    totals.unreported["kept_rows"] = _share(rejection.has_kept, ratio.has_response)
    totals.extremes["distance"] = _token_extremes(ratio.values.abs(), ratio)
    totals.extremes["log_ppl_diff"] = _extremes(-ratio.sequence_means(ratio.values), ratio.lengths > 0)
    if weights is not None and settings.weights is not None:
        _measure_weights(totals, ratio, weights, settings)
    for rule in settings.rules:
        _measure_rule(totals, rule, rejection.statistics[rule.name], ratio)
    _measure_groups(totals, ratio, rejection, context, full=settings.full)
    if not settings.full:
        return CorrectionStatistics.from_totals(totals, [])
    if settings.tests_misalignment:
        signatures = map_numbers(lambda column, is_extreme: column.sum(), signature_sums(ratio, context))
        totals = replace(totals, ratios=_token_moments(ratio.excess, ratio), signatures=signatures)
    rows = ratio.lengths > 0
    sums, means = ratio.sequence_sums(ratio.values), ratio.sequence_means(ratio.values)
    logs = ((ratio.values, ratio.valid), (sums, rows), (means, rows))
    return CorrectionStatistics.from_totals(totals, [log_ratio_histogram(*one) for one in logs])


def row_weights(ratio: LogRatio, weights: Weights) -> dict[str, Tensor]:
    """The weight of each sequence, applied and raw: the mean over its valid tokens, float64 ``[b]``."""
    return {
        name: w[:, 0] if w.shape[1] == 1 else ratio.sequence_means(w * ratio.ones)
        for name, w in (("applied", weights.applied), ("raw", weights.raw))
    }


def _gap(ratio: LogRatio) -> dict[str, Mean[Tensor]]:
    """The distance of the policies, before any weight or rule."""
    valid, rows = ratio.valid, ratio.lengths > 0
    train, difference = ratio.sequence_means(ratio.train), -ratio.sequence_means(ratio.values)
    rollout = train + difference
    clamped = ratio.values.abs() > LOG_RATIO_BOUND
    return {
        "kl": _token_mean(-ratio.values, ratio),
        "k3_kl": _token_mean(ratio.k3, ratio),
        "nonfinite_token_fraction": _share(~valid, ratio.response),
        "training_ppl": _mean((-train).exp(), rows),
        "training_log_ppl": _mean(-train, rows),  # log-perplexities are minus mean log-probs
        "rollout_ppl": _mean((-rollout).exp(), rows),
        "rollout_log_ppl": _mean(-rollout, rows),
        "log_ppl_diff": _mean(difference, rows),
        "log_ppl_abs_diff": _mean(difference.abs(), rows),
        "ppl_ratio": _mean(difference.exp(), rows),
        "chi2_token": _token_mean(ratio.excess * (ratio.excess + 2), ratio),  # rho^2 - 1
        "chi2_seq": _mean(torch.expm1(2 * bound_log_ratio(ratio.sequence_sums(ratio.values))), rows),
        "safety_clamped_fraction": _share(clamped, valid),
    }


def _rejected(ratio: LogRatio, rejection: Rejection, settings: CorrectionSettings) -> dict[str, Mean[Tensor]]:
    """Shares of tokens and sequences that are rejected, by any cause and by the rules without a statistic."""
    response, shares = ratio.response, dict[str, Mean[Tensor]]()
    has_response = ratio.has_response
    if settings.rejects:
        rejected = response & ~rejection.keep_mask
        shares |= {
            "rollout_rs_masked_fraction": _share(rejected, response),
            "rollout_rs_seq_masked_fraction": _share(rejected.any(dim=-1), has_response),
            "rollout_rs_seq_rejected_fraction": _share(~rejection.has_kept, has_response),
        }
    if rejection.below_veto is not None:
        shares |= {
            "rollout_is_veto_fraction": _share(rejection.below_veto.any(dim=-1), ratio.lengths > 0),
            "rollout_is_catastrophic_token_fraction": _share(rejection.below_veto, ratio.valid),
        }
    if rejection.opsm is not None:
        shares |= {
            "rollout_rs_opsm_masked_fraction": _share(rejection.opsm, response),
            "rollout_rs_opsm_seq_masked_fraction": _share(rejection.opsm.any(dim=-1), has_response),
        }
    return shares


def _measure_weights(
    totals: Totals[Tensor], ratio: LogRatio, weights: Weights, settings: CorrectionSettings
) -> None:
    """Add the weights of tokens and sequences, and shares of those beyond the threshold."""
    assert settings.weights is not None
    per_row, threshold, rows = settings.weights.is_per_row, settings.weights.threshold, ratio.lengths > 0
    of_rows = row_weights(ratio, weights)
    for kind, w in (("applied", weights.applied), ("raw", weights.raw)):
        if kind == "applied" or settings.full or per_row:
            totals.weights[f"{kind}_token"] = _token_weights(w, ratio)
            totals.weights[f"{kind}_sequence"] = _weight_sums(of_rows[kind], rows)
    # Logarithms are compared: they are known beyond the safety bound, too.
    high, low = weights.logs > math.log(threshold.upper), weights.logs < math.log(threshold.reciprocal_lower)
    units = rows[:, None] if per_row else ratio.valid
    shares = {
        "seq_fraction_high": _share(of_rows["raw"] > threshold.upper, rows),
        "seq_fraction_low": _share(of_rows["raw"] < threshold.reciprocal_lower, rows),
        "ratio_fraction_high": _share(high, units),
        "ratio_fraction_low": _share(low, units),
    }
    if threshold.lower is not None:
        shares["oob_ratio"] = _share(high | low, ratio.valid)
    totals.means.update({f"rollout_is_{name}": share for name, share in shares.items()})


def _token_weights(weights: Tensor, ratio: LogRatio) -> WeightSums[Tensor]:
    is_per_row = weights.shape != ratio.values.shape
    masked, ones = (weights, 1.0) if is_per_row else (weights * ratio.ones, ratio.ones)
    return WeightSums(
        _token_moments(masked - ones, ratio),
        _token_sum(masked * masked, ratio),
        # in the precision of what is applied
        _token_extremes(weights.to(ratio.values.dtype), ratio),
    )


def _weight_sums(weights: Tensor, members: Tensor) -> WeightSums[Tensor]:
    squares = (weights * members).square().sum()
    return WeightSums(_moments(weights - 1.0, members), squares, _extremes(weights, members))


def _measure_rule(totals: Totals[Tensor], rule: BoundedRule, statistic: Tensor, ratio: LogRatio) -> None:
    """Add the statistic of a rule, that of a sequence counting at each of its tokens."""
    valid, rows = ratio.valid, ratio.lengths > 0
    units = rows[:, None] if rule.rule.rejects_rows else valid
    if not rule.rule.rejects_rows:
        statistic = statistic * ratio.ones
    of_rows = statistic[:, 0] if rule.rule.rejects_rows else ratio.sequence_means(statistic)
    above, below = statistic > rule.upper, statistic < rule.lower
    outside = above | below
    seq_above, seq_below = of_rows > rule.upper, of_rows < rule.lower
    if rule.rule.bounds_ratio:  # k1 is minus the log-ratio: where it is small, the ratio is high
        above, below, seq_above, seq_below = below, above, seq_below, seq_above
    shares = {
        "mean": _token_mean(statistic, ratio),
        "masked_fraction": _share(outside, valid),
        "seq_masked_fraction": _share((outside & valid).any(dim=-1), rows),
        "fraction_high": _share(above, units),
        "fraction_low": _share(below, units),
        "seq_fraction_high": _share(seq_above, rows),
    }
    if rule.rule.bounds_ratio:
        shares["seq_fraction_low"] = _share(seq_below, rows)
    totals.means.update({f"rollout_rs_{rule.name}_{name}": share for name, share in shares.items()})
    nearest = min(max(0.0, rule.lower), rule.upper)
    totals.rules[rule.name] = RuleTotals(
        _token_moments(statistic.clamp(rule.lower, rule.upper) - nearest, ratio),
        _token_extremes(statistic, ratio),
        _moments(of_rows, rows),
        _extremes(of_rows, rows),
    )


def _measure_groups(
    totals: Totals[Tensor], ratio: LogRatio, rejection: Rejection, context: SequenceContext, *, full: bool
) -> None:
    """Add what is measured of tokens of one age and, in full diagnostics, of one turn, one sign of the
    advantage, and right or wrong sequences."""
    response, keep = ratio.response, rejection.keep_mask
    if (ages := context.ages(response)) is not None:
        totals.means["token_age_mean"] = _token_mean(ages * ratio.ones, ratio)
        for age, members in enumerate(_buckets(ages, NUM_AGES)):
            totals.splits[f"age_{age}_k3_kl"] = _mean(ratio.k3, members & ratio.valid)
            totals.splits[f"age_{age}_rejected_fraction"] = _share(~keep, members & response)
    if not full:
        return
    for turn, members in enumerate(_buckets(ratio.turns, NUM_TURNS) if context.by_turn else ()):
        totals.splits[f"turn_{turn}_k3_kl"] = _mean(ratio.k3, members & ratio.valid)
    if context.advantages is not None:
        for name, sign in zip(SIGNS, (context.advantages > 0, context.advantages < 0), strict=True):
            totals.splits[f"kept_fraction_{name}"] = _share(keep, sign & response)
    if context.scores is not None:
        totals.splits.update(_by_score(ratio, rejection, context.scores.double()))


def _buckets(numbers: Tensor, count: int) -> Iterator[Tensor]:
    """One mask, bool ``[b, t]``, for each of ``count`` buckets; the last takes all above."""
    numbers = numbers.clamp(0, count - 1)
    return (numbers == bucket for bucket in range(count))


def _by_score(ratio: LogRatio, rejection: Rejection, scores: Tensor) -> dict[str, Mean[Tensor]]:
    """Share of the tokens kept of right and of wrong sequences; scores of kept and of rejected sequences."""
    answers = dict(zip(ANSWERS, (scores > 0, scores <= 0), strict=True))
    shares = {
        f"kept_fraction_{name}": _share(rejection.keep_mask, ratio.response & right[:, None])
        for name, right in answers.items()
    }
    groups = {"kept": rejection.has_kept, "rejected": ratio.has_response & ~rejection.has_kept}
    return shares | {f"{name}_score_mean": _mean(scores, members) for name, members in groups.items()}
