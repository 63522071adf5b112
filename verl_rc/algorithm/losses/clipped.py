"""Policy losses whose gradient goes through the ratio of current to old policy, held near 1 by a clip or a
gate."""

import torch
from torch import Tensor

from verl_rc.algorithm.losses.inputs import LossMetrics, PolicyLossInputs, register_policy_loss
from verl_rc.tensor_ops import masked_row_sums

LOG_SEQUENCE_RATIO_MAX = 10.0
"""Upper bound, in nats, of the log of a sequence's ratio."""
WEIGHT_FLOOR = 1e-10
"""Added to importance weights before their logarithm is taken."""


def clip_ratio(ratio: Tensor, inputs: PolicyLossInputs) -> Tensor:
    """``clip(r, 1 − ε_low, 1 + ε_high)``, in the shape of ``ratio``."""
    low, high = inputs.parameters.clip_bounds
    return ratio.clamp(1 - low, 1 + high)


def surrogates(
    inputs: PolicyLossInputs, ratio: Tensor, clipped: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``−A r`` and ``−A clip(r)``, [B, T] each; PPO's loss is the larger of the two.

    ``clipped``: the ratio within its bounds, by default those of ``clip_ratio``.
    """
    clipped = clip_ratio(ratio, inputs) if clipped is None else clipped
    return -inputs.advantages * ratio, -inputs.advantages * clipped


@register_policy_loss("vanilla")
def ppo_clip_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate (PPO, arXiv:1707.06347) with dual clip (arXiv:1912.09729); the loss mode
    ``vanilla``.

    ``w · max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high))``, and for A < 0 at most ``−w A c``. The importance
    weight w multiplies after clipping. A rejected token leaves the sum and changes no other token's term.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens whose clipped branch is the larger one),
        ``actor/pg_clipfrac_lower`` (share of tokens where c acts), those of ``ppo_kl_metrics``.
    """
    ratio = inputs.log_ratio.exp()
    return dual_clip(inputs, ratio, clip_ratio(ratio, inputs))


def dual_clip(inputs: PolicyLossInputs, ratio: Tensor, clipped_ratio: Tensor) -> tuple[Tensor, LossMetrics]:
    """The loss of ``ppo_clip_loss`` with a ratio that is clipped so, [B, T] both."""
    unclipped, clipped = surrogates(inputs, ratio, clipped_ratio)
    # For A < 0 the larger surrogate grows with the ratio without limit; dual clip holds it at −A c.
    surrogate, bound = torch.maximum(unclipped, clipped), -inputs.advantages * inputs.parameters.clip_ratio_c
    negative = inputs.advantages < 0
    return inputs.reduce(torch.where(negative, torch.minimum(surrogate, bound), surrogate)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(clipped > unclipped),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(negative & (surrogate > bound)),
    }


@register_policy_loss("up")
def up_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Unbounded positive asymmetric optimisation (UP-GRPO, arXiv:2607.06987); the loss mode ``up``.

    For A > 0 ``−w A p / sg(p)``: 1 in value, with the gradient of log p, never clipped, whatever the old
    policy was. Else the loss of ``ppo_clip_loss``. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and the metrics of ``ppo_clip_loss``; no token with A > 0 counts as clipped.
    """
    own = (inputs.log_probs - inputs.log_probs.detach()).exp()
    ratio = own.where(inputs.advantages > 0, inputs.log_ratio.exp())
    return dual_clip(inputs, ratio, clip_ratio(ratio, inputs))


@register_policy_loss("gspo")
def gspo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate on the ratio of a whole sequence (GSPO, arXiv:2507.18071); the loss mode
    ``gspo``.

    s = exp(mean over the sequence of log(current / old)); per token log s_t = lp − sg(lp) + sg(log s), so
    that every token carries the ratio of its sequence and its own gradient; ``w · max(−A s_t, −A clip(s_t, 1
    − ε_low, 1 + ε_high))``. The mean runs over ``response_mask``: rejecting a token removes its term and
    leaves s as it is. Weights multiply per token. The paper averages ``seq-mean-token-mean``; here the mode
    asked for is used.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens whose clipped branch is the larger one),
        ``actor/pg_clipfrac_lower`` (0), ``actor/ppo_kl`` (mean of old − current, nats).
    """
    token_loss, metrics = _sequence_surrogate(inputs)
    return inputs.reduce(token_loss), metrics


@register_policy_loss("luspo")
def luspo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Length-unbiased sequence policy optimisation (LUSPO, arXiv:2602.05261); the loss mode ``luspo``.

    GSPO's loss of a sequence times its length: the terms of ``gspo_loss``, always averaged
    ``seq-mean-token-sum``.

    Returns:
        The loss, 0-d, and the metrics of ``gspo_loss``.
    """
    token_loss, metrics = _sequence_surrogate(inputs)
    return inputs.reduce(token_loss, inputs.aggregation.with_mode("seq-mean-token-sum")), metrics


def _sequence_surrogate(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The terms of ``gspo_loss`` [B, T], before weights, and its metrics."""
    sequence_tokens = inputs.response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    log_ratio = inputs.unbounded_log_ratio
    # Detached: the gradient of a token must go through its own log-prob only. With the mean in the graph
    # every token would get the sequence's gradient (GSPO-token in the paper).
    log_sequence_ratio = log_ratio.detach().sum(dim=-1, keepdim=True) / sequence_tokens
    # 0 in value and 1 in gradient.
    own_gradient = inputs.log_probs - inputs.log_probs.detach()
    # The bound is verl's. e^10 = 22,026; without a bound exp overflows float32 from 88.8 nats on.
    ratio = (own_gradient + log_sequence_ratio).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()
    unclipped, clipped = surrogates(inputs, ratio)
    return torch.maximum(unclipped, clipped), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(clipped > unclipped),
        "actor/ppo_kl": inputs.mean_over_tokens(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(torch.zeros_like(clipped)),
    }


@register_policy_loss("geo_mean")
def geo_mean_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Geometric-mean policy optimisation (GMPO, arXiv:2507.20673); the loss mode ``geo_mean``.

    Per sequence ``−mean(A) · exp(mean(d'))`` with d = log(current / old) and d' = d cut to ε_high from above
    where A > 0 and to −ε_low from below where A < 0; then the mean over sequences, in every aggregation mode.

    Both means run over ``response_mask``, so rejecting a token does not change the ratio: the token only
    loses its gradient. A sequence with every token rejected leaves the sum. Its importance weight is
    exp(mean(log(w + 1e-10))) over kept tokens; a token whose weight is 0 (outside an IcePop band) counts as
    rejected, where the formula taken literally would shrink the whole sequence.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens with d outside [−ε_low, ε_high] and A > 0),
        ``actor/pg_clipfrac_lower`` (the same with A < 0), those of ``ppo_kl_metrics``.
    """
    kept = inputs.loss_mask
    weights = inputs.rollout_is_weights
    if weights is not None:
        # log(0 + 1e-10) = −23 nats in a single token would pull down the weight of the whole sequence.
        kept = kept & (weights > 0)
    log_ratio = inputs.log_ratio
    # Rejected tokens stay in the mean, so that the ratio does not change, and lose only their gradient.
    log_ratio = log_ratio.where(kept, log_ratio.detach())
    low, high = inputs.parameters.clip_bounds
    clamped = log_ratio.clamp(-low, high)
    sign = inputs.advantages.sign()
    # The minimum for A > 0, the maximum for A < 0: clipped only where the advantage pushes further away.
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)
    ratio = _sequence_mean(pessimistic, inputs.response_mask).exp()
    sequence_loss = -_sequence_mean(inputs.advantages, inputs.response_mask) * ratio
    if weights is not None:
        sequence_loss = sequence_loss * _sequence_mean((weights + WEIGHT_FLOOR).log(), kept).exp()
    loss = inputs.aggregation.with_mode("seq-mean-token-sum").reduce(
        sequence_loss, kept.any(dim=-1, keepdim=True), inputs.denominator_mask.any(dim=-1, keepdim=True)
    )
    outside = log_ratio.detach() != clamped.detach()
    return loss, {
        "actor/pg_clipfrac": inputs.mean_over_tokens(outside & (inputs.advantages > 0)),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(outside & (inputs.advantages < 0)),
    }


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the tokens in ``mask`` of each sequence: [B, 1]; 0 without any."""
    return (masked_row_sums(values, mask) / mask.sum(dim=-1).clamp(min=1)).unsqueeze(-1)


@register_policy_loss("sapo")
def sapo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Soft adaptive policy optimisation (SAPO, arXiv:2511.20347); the loss mode ``sapo``.

    ``−w A (4 / τ) sigmoid(τ (r − 1))`` with r = current / old and τ = ``tau_pos`` for A > 0, else
    ``tau_neg``; its slope at r = 1 is that of the unclipped surrogate. Always averaged
    ``seq-mean-token-mean``, as the paper defines it. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower`` (both 0: nothing is clipped),
        those of ``ppo_kl_metrics``.
    """
    ratio = inputs.log_ratio.exp()
    positive = ratio.new_full((), inputs.parameters.tau_pos)
    temperature = positive.where(inputs.advantages > 0, ratio.new_full((), inputs.parameters.tau_neg))
    # The sigmoid has the slope 1/4 at 0: 4 / τ makes the slope at r = 1 that of the surrogate.
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    none_clipped = inputs.mean_over_tokens(torch.zeros_like(ratio))
    loss = inputs.reduce(-inputs.advantages * gate, inputs.aggregation.with_mode("seq-mean-token-mean"))
    return loss, {
        "actor/pg_clipfrac": none_clipped,
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": none_clipped,
    }
