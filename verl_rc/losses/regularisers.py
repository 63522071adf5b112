"""Terms added to the policy loss: entropy and divergence from the reference policy."""

from __future__ import annotations

from torch import Tensor

from verl_rc.losses.aggregate import Aggregation, token_metric
from verl_rc.losses.inputs import LossMetrics
from verl_rc.tensor_ops import kl_penalty


def compute_entropy_loss(
    entropy: Tensor,
    loss_mask: Tensor,
    denominator_mask: Tensor | None = None,
    aggregation: str | Aggregation = "token-mean",
) -> tuple[Tensor, LossMetrics]:
    """Aggregates the policy's entropy; subtract it, times `entropy_coeff`, from the policy loss to raise entropy.

    Args:
        entropy: [B, T], nats; of the distribution at each position; carries the gradient.
        loss_mask: [B, T], bool or 0/1; response tokens that rejection kept.
        denominator_mask: [B, T]; tokens counted in denominators that `aggregation` leaves open; `loss_mask` when None.
        aggregation: a mode's name, or the record with the mini-batch's denominators.

    Returns:
        The aggregated entropy, 0-d, nats, and `actor/entropy` (mean over `loss_mask`).

    Raises:
        ValueError: when shapes differ.
    """
    kept = loss_mask.bool()
    total = Aggregation.from_name(aggregation).reduce(entropy, kept, denominator_mask)
    return total, {"actor/entropy": token_metric(entropy, kept)}


def compute_kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str,
    loss_mask: Tensor,
    denominator_mask: Tensor | None = None,
    aggregation: str | Aggregation = "token-mean",
) -> tuple[Tensor, LossMetrics]:
    """Aggregates an estimate of KL(current ‖ reference); add it, times `kl_loss_coef`, to the policy loss.

    Args:
        log_probs: [B, T], nats; of the policy being updated; carries the gradient.
        ref_log_probs: [B, T], nats; of the reference policy.
        kind: an estimator of `kl_penalty` (`actor_rollout_ref.actor.kl_loss_type`).
        loss_mask: [B, T], bool or 0/1; response tokens that rejection kept. NaN outside is harmless.
        denominator_mask: [B, T]; tokens counted in denominators that `aggregation` leaves open; `loss_mask` when None.
        aggregation: a mode's name, or the record with the mini-batch's denominators.

    Returns:
        The aggregated divergence, 0-d, nats, and `actor/kl_loss` (mean over `loss_mask`).

    Raises:
        ValueError: for an unknown estimator, or when shapes differ.
    """
    kept = loss_mask.bool()
    divergence = kl_penalty(log_probs.where(kept, 0), ref_log_probs.detach().where(kept, 0), kind)
    total = Aggregation.from_name(aggregation).reduce(divergence, kept, denominator_mask)
    return total, {"actor/kl_loss": token_metric(divergence, kept)}
