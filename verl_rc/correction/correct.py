"""THE PAGE of rollout correction: weights and keep mask from the log-probs of two policies.

For a response token t that the rollout policy sampled with probability q, and that has p under the train
policy:

    log-ratio     l = log p - log q
    log-weight    token: l   prefix: sum of l up to t   turn, sequence: sum of its l   geometric: mean of l
    weight        min(exp(log-weight), upper); with a band 0 outside it; the log-weight within +-20
    divergence    k1 = -l   k2 = l^2/2   k3 = e^l - 1 - l   with l within +-20
                  tv = |p - q|   bkl = KL of the coins (q, 1-q), (p, 1-p)   kpop: larger of both directions
    statistic     the divergence of t; or sum, mean, largest of its turn or sequence
    keep          lower <= statistic <= upper for every rule (a ratio in [L, U] is a k1 in [-ln U, -ln L]),
                  and no l of the sequence below the veto, no OPSM, no log-prob that is not finite
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rejection_rules import RejectionRule, Threshold
from verl_rc.config.rollout_correction import CorrectionSettings, WeightSettings
from verl_rc.correction.log_ratio import LogRatio
from verl_rc.tensor_ops import bound_log_ratio


@dataclass(frozen=True)
class Weights:
    """Importance weights of some sequences: ``[b, t]``, or ``[b, 1]`` where a sequence has one. Positions
    without a valid token have some weight, too."""

    logs: Tensor
    """Logarithms of the raw weights, unbounded."""
    raw: Tensor
    """float64, before the threshold."""
    applied: Tensor
    """float64, after it and before normalisation."""


@dataclass(frozen=True)
class Rejection:
    """Tokens of some sequences that rules exclude from the loss."""

    keep_mask: Tensor
    """bool ``[b, t]``: True where no rule and no log-prob that is not finite rejects."""
    has_kept: Tensor
    """bool ``[b]``: sequences with a response token that is kept."""
    statistics: Mapping[str, Tensor]
    """The statistics that the rules bound, by rule: ``[b, t]``, or ``[b, 1]`` of whole sequences."""
    below_veto: Tensor | None
    """bool ``[b, t]``: valid tokens below ``rollout_token_veto_threshold``."""
    opsm: Tensor | None
    """bool ``[b, t]``: tokens that off-policy sequence masking rejects."""


def importance_weights(ratio: LogRatio, settings: WeightSettings) -> Weights:
    """The weights of a level (see above). token corrects the action but not the states; prefix both
    (per-decision importance sampling: Precup, Sutton and Singh 2000); turn a turn as one action; sequence is
    the unbiased ratio of whole responses; geometric does not grow with length."""
    l = ratio.values.double()  # noqa: E741  (as in the formulas)
    logs = {
        "token": lambda: l,
        "prefix": lambda: l.cumsum(dim=-1),
        "turn": lambda: ratio.turn_sums(l),
        "sequence": lambda: ratio.sequence_sums(l)[:, None],
        "geometric": lambda: ratio.sequence_means(l)[:, None],
    }[settings.level]()
    raw = bound_log_ratio(logs).exp()
    return Weights(logs, raw, bounded(raw, settings.threshold))


def candidate_weights(ratio: LogRatio, settings: WeightSettings, candidates: Tensor) -> Tensor:
    """float64 ``[b, t, c]``: the weights that tokens would have if the sampler had drawn one of c others in
    their place, with the log-ratios ``candidates`` ``[b, t, c]``: these replace one term of the log-weight,
    which is a sum, or for the level geometric a mean."""
    terms = ratio.lengths.clamp(min=1)[:, None, None] if settings.level == "geometric" else 1
    logs = importance_weights(ratio, settings).logs[..., None]
    logs = logs + (candidates.double() - ratio.values.double()[..., None]) / terms
    return bounded(bound_log_ratio(logs).exp(), settings.threshold)


def bounded(weights: Tensor, threshold: Threshold) -> Tensor:
    """Truncation ``min(w, upper)`` (Ionides 2008), or the band of IcePop (arXiv:2510.18855): ``w`` where
    ``lower <= w <= upper``, else 0."""
    if threshold.lower is None:
        return weights.clamp(max=threshold.upper)
    return torch.where((threshold.lower <= weights) & (weights <= threshold.upper), weights, 0.0)


def reject(ratio: LogRatio, settings: CorrectionSettings, advantages: Tensor | None) -> Rejection:
    """Apply every rule to all tokens, also to those that another one rejects.

    ``advantages`` ``[b, t]`` are for the rule that reads their sign; ``ValueError`` when they are missing.
    Rules do not see tokens with log-probs that are not finite; under ``nonfinite_logprob=neutral`` these
    count with a ratio of 1.
    """
    candidates = ratio.response if settings.nonfinite == "neutral" else ratio.valid
    keep = torch.ones_like(candidates)
    statistics, below_veto, opsm = dict[str, Tensor](), None, None
    for rule in settings.rules:
        statistic = rule_statistic(rule.rule, ratio)
        statistics[rule.name] = statistic
        inside = (rule.lower <= statistic) & (statistic <= rule.upper)
        # A rule on sequences rejects their padding, too, and none without a valid token.
        judged = ratio.lengths[:, None] > 0 if rule.rule.rejects_rows else candidates
        keep = keep & (inside | ~judged)
    if settings.log_veto is not None:
        below_veto = ratio.valid & (ratio.values < settings.log_veto)
        keep = keep & ~below_veto.any(dim=-1, keepdim=True)
    if settings.opsm_threshold is not None:
        if advantages is None:
            threshold = f"rollout_opsm_threshold={settings.opsm_threshold}"
            raise ValueError(f"{threshold} looks at the sign of the advantages: pass advantages [B, T]")
        # DeepSeek-V3.2, arXiv:2512.02556, equation 9: negative samples that the policy no longer produces.
        drift = -ratio.sequence_means(ratio.values)[:, None]
        opsm = ratio.response & (advantages < 0) & (drift > settings.opsm_threshold)
        keep = keep & ~opsm
    nonfinite = ratio.response & ~ratio.valid
    if settings.nonfinite == "reject_token":
        keep = keep & ~nonfinite
    elif settings.nonfinite == "reject_sequence":
        keep = keep & ~nonfinite.any(dim=-1, keepdim=True)
    return Rejection(keep, (keep & ratio.response).any(dim=-1), statistics, below_veto, opsm)


def rule_statistic(rule: RejectionRule, ratio: LogRatio) -> Tensor:
    """The statistic of a rule, float64: of each token, or the sum or mean over its turn, ``[b, t]``; or the
    sum, mean or maximum over a sequence, ``[b, 1]``."""
    divergence = ratio.divergence(rule.divergence)
    if rule.scope == "token":
        return divergence
    if rule.scope == "turn_sum":
        return ratio.turn_sums(divergence)
    if rule.scope == "turn_mean":
        return ratio.turn_sums(divergence) / ratio.turn_sums(ratio.ones).clamp(min=1)
    of_sequence = {
        "seq_sum": ratio.sequence_sums,
        "seq_mean": ratio.sequence_means,
        "seq_max": ratio.sequence_maxima,
    }[rule.scope](divergence)
    return of_sequence[:, None]
