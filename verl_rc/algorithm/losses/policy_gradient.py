"""Policy losses whose gradient goes through log π: the ratio to the old policy is a constant, or absent."""

import torch
from torch import Tensor

from verl_rc.algorithm.losses.clipped import clip_ratio
from verl_rc.algorithm.losses.inputs import LossMetrics, PolicyLossInputs, register_policy_loss
from verl_rc.tensor_ops import binary_kl, bound_log_ratio, masked_row_sums


@register_policy_loss("gpg")
def gpg_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Group policy gradient (GPG, arXiv:2504.02546); the loss mode ``gpg``.

    ``−w A lp``: no ratio, no clip; the ratio's denominator is not looked at. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and no metrics.
    """
    return inputs.reduce(-inputs.advantages * inputs.log_probs), {}


@register_policy_loss("reinforce")
def reinforce_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """REINFORCE (Williams 1992) with detached importance weights; ``loss_type=reinforce``.

    ``−A lp sg(w)`` with w of current over rollout; its gradient is −A w ∇lp, the importance-weighted policy
    gradient (Degris et al. 2012, arXiv:1205.4839). Without weights w = 1. No clipping. A rejected token
    leaves the sum. The ratio's denominator is the rollout policy and serves the
    metric only.

    Returns:
        The loss, 0-d, and ``actor/ppo_kl`` (mean of old − current, nats).
    """
    loss = inputs.reduce(-inputs.advantages * inputs.log_probs)
    return loss, {"actor/ppo_kl": inputs.mean_over_tokens(-inputs.unbounded_log_ratio)}


@register_policy_loss("cispo")
def cispo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Clipped importance-sampling policy optimisation (CISPO, arXiv:2506.13585); the loss mode ``cispo``.

    ``−w sg(clip(r, 1 − ε_low, 1 + ε_high)) A lp`` with r = current / old: a clipped token keeps a gradient. A
    rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens with r outside the band),
        ``actor/pg_clipfrac_lower`` (0), those of ``ppo_kl_metrics``.
    """
    # Detached: the gradient goes through lp, so that a clipped token keeps one. In PPO it has none.
    ratio = inputs.log_ratio.detach().exp()
    clipped_ratio = clip_ratio(ratio, inputs)
    return inputs.reduce(-clipped_ratio * inputs.advantages * inputs.log_probs), {
        # Without rounding: clamp returns numbers inside the band as they are.
        "actor/pg_clipfrac": inputs.mean_over_tokens(ratio != clipped_ratio),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(torch.zeros_like(ratio)),
    }


@register_policy_loss("dppo_tv")
def dppo_tv_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Divergence PPO with total variation (DPPO, arXiv:2602.04879); the loss mode ``dppo_tv``.

    ``−w A sg(min(r, c)) lp M`` with M = [π − π_old ≤ ε_high] for A > 0 and [π − π_old ≥ −ε_low] otherwise; π
    are probabilities of the sampled token and c is ``clip_ratio_c`` (the paper uses 20). A rejected token
    leaves the sum.

    Returns:
        The loss, 0-d, and the metrics of ``_masked_policy_gradient``.
    """
    return _masked_policy_gradient(inputs, _probability_has_not_moved(inputs))


def _probability_has_not_moved(inputs: PolicyLossInputs) -> Tensor:
    """True where the probability of the token has moved by no more than ε_high up (A > 0), or ε_low down."""
    # Log-probs are at most 0: these exponentials need no bound.
    change = inputs.log_probs.detach().exp() - inputs.ratio_denominator.exp()
    low, high = inputs.parameters.clip_bounds
    return torch.where(inputs.advantages > 0, change <= high, change >= -low)


@register_policy_loss("ipo")
def ipo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Prime-rl's loss of that name (its default since August 2026); the loss mode ``ipo``.

    ``w (−A r M + τ (log r)²)`` with M = [|p − p_old| ≤ ε], whatever the sign of A; ε is ``ipo_eps``, τ is
    ``kl_tau``. Tokens outside the region keep the penalty. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens outside the region),
        ``actor/pg_clipfrac_lower`` (0), those of ``ppo_kl_metrics``.
    """
    # Log-probs are at most 0: these exponentials need no bound.
    change = inputs.log_probs.detach().exp() - inputs.ratio_denominator.exp()
    trusted, ratio = change.abs() <= inputs.parameters.ipo_eps, inputs.log_ratio.exp()
    # Not bounded: the penalty must pull back what has gone far.
    penalty = inputs.parameters.kl_tau * inputs.unbounded_log_ratio.square()
    return inputs.reduce((-inputs.advantages * ratio).where(trusted, 0) + penalty), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(~trusted),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(torch.zeros_like(ratio)),
    }


@register_policy_loss("aspo")
def aspo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Asymmetric importance sampling policy optimisation (ASPO, arXiv:2510.06062); the loss mode ``aspo``.

    ``−w A sg(min(r', c)) lp M`` with r' = 1/r and M = [r ≤ 1 + ε_high] for A > 0, r' = r and M = [r ≥ 1 −
    ε_low] otherwise; c is ``clip_ratio_c``. Its gradient is that of the authors' code (Archer2.0), which
    gives tokens of high entropy another range besides. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and the metrics of ``_masked_policy_gradient``.
    """
    positive, ratio = inputs.advantages > 0, inputs.log_ratio.detach().exp()
    low, high = inputs.parameters.clip_bounds
    trusted = torch.where(positive, ratio <= 1 + high, ratio >= 1 - low)
    return _masked_policy_gradient(inputs, trusted, torch.where(positive, 1 / ratio, ratio))


@register_policy_loss("topr")
def topr_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Tapered off-policy REINFORCE (TOPR, arXiv:2503.14286); the loss mode ``topr``.

    ``−w A lp`` for A > 0, ``−w A sg(min(s, 1)) lp`` otherwise, with s the ratio of the whole sequence: the
    product over ``response_mask``. Advantages stand for the paper's rewards, whose sign decides there. (ROLL
    and Trinity take the ratio of the token.) A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (0), ``actor/pg_clipfrac_lower`` (share of tokens with A < 0
        whose weight is held at 1), those of ``ppo_kl_metrics``.
    """
    ratio, negative = _sequence_ratio(inputs), inputs.advantages < 0
    taper = ratio.clamp(max=1).where(negative, torch.ones_like(ratio))
    return inputs.reduce(-inputs.advantages * taper * inputs.log_probs), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(torch.zeros_like(taper)),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(negative & (ratio > 1)),
    }


@register_policy_loss("vespo")
def vespo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Variational sequence-level soft policy optimisation (VESPO, arXiv:2602.10693); the loss mode ``vespo``.

    ``−w A sg(φ) lp`` with φ = s^k e^(λ − λ s), which is 1 at s = 1, and s the ratio of the whole sequence:
    the product over ``response_mask``; k = 2 and λ = 3 for A ≥ 0, k = 3 and λ = 2
    otherwise. A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` and ``actor/pg_clipfrac_lower`` (both 0: nothing is clipped),
        those of ``ppo_kl_metrics``.
    """
    ratio = _sequence_ratio(inputs)
    power = torch.where(inputs.advantages < 0, ratio.new_full((), 3.0), ratio.new_full((), 2.0))
    decay = 5 - power
    kernel = (decay + power * ratio.log() - decay * ratio).exp()
    none_clipped = inputs.mean_over_tokens(torch.zeros_like(kernel))
    return inputs.reduce(-inputs.advantages * kernel * inputs.log_probs), {
        "actor/pg_clipfrac": none_clipped,
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": none_clipped,
    }


def _sequence_ratio(inputs: PolicyLossInputs) -> Tensor:
    """Product of the ratios over ``response_mask``, bounded as a token's ratio is: [B, 1], detached."""
    return bound_log_ratio(masked_row_sums(inputs.log_ratio.detach(), inputs.response_mask)).exp()[:, None]


@register_policy_loss("dppo_kl")
def dppo_kl_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Divergence PPO with the binary KL divergence (DPPO, arXiv:2602.04879); the loss mode ``dppo_kl``.

    As ``dppo_tv_loss``, with KL = π_old log(π_old / π) + (1 − π_old) log((1 − π_old) / (1 − π)), in nats, and
    M = [KL ≤ ε_high or π ≤ π_old] for A > 0, [KL ≤ ε_low or π ≥ π_old] otherwise: only moves in the direction
    that the advantage pushes are limited.

    Returns:
        The loss, 0-d, and the metrics of ``_masked_policy_gradient``.
    """
    current = inputs.log_probs.detach()
    old = inputs.ratio_denominator
    divergence = binary_kl(old, current)
    low, high = inputs.parameters.clip_bounds
    may_rise = (divergence <= high) | (current <= old)
    may_fall = (divergence <= low) | (current >= old)
    return _masked_policy_gradient(inputs, torch.where(inputs.advantages > 0, may_rise, may_fall))


def _masked_policy_gradient(
    inputs: PolicyLossInputs, trusted: Tensor, ratio: Tensor | None = None
) -> tuple[Tensor, LossMetrics]:
    """Policy gradient of the tokens inside the trust region, weighted by the detached ratio (or another one)
    up to c.

    Returns:
        The loss, 0-d, and ``actor/pg_clipfrac`` (share of tokens outside the region),
        ``actor/pg_clipfrac_lower`` (share inside it with r > c), those of ``ppo_kl_metrics``.
    """
    ratio = inputs.log_ratio.detach().exp() if ratio is None else ratio
    cap = inputs.parameters.clip_ratio_c
    token_loss = -inputs.advantages * ratio.clamp(max=cap) * inputs.log_probs
    return inputs.reduce(token_loss.where(trusted, 0)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(~trusted),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(trusted & (ratio > cap)),
    }


@register_policy_loss("dro")
def dro_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Direct reward optimisation (DRO, arXiv:2405.19107); the loss mode ``dro``.

    ``−w (A lp − β/2 (lp − lp_old)²)`` with β = ``dro_beta``; the weight multiplies the penalty too. A
    rejected token leaves the sum.

    Returns:
        The loss, 0-d, and ``actor/ppo_kl`` (mean of old − current, nats).

    Raises:
        ValueError: when ``dro_beta`` is not set.
    """
    beta = inputs.parameters.dro_beta
    if beta is None:
        raise ValueError("the loss 'dro' needs actor_rollout_ref.actor.policy_loss.dro_beta > 0, got None")
    # Not bounded: the penalty must pull back what has gone far.
    log_ratio = inputs.unbounded_log_ratio
    return inputs.reduce(0.5 * beta * log_ratio.square() - inputs.advantages * inputs.log_probs), {
        "actor/ppo_kl": inputs.mean_over_tokens(-log_ratio)
    }
