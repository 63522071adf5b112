"""The terms of the actor's loss: the policy loss by its name, entropy, and divergence from the reference
policy."""

from collections.abc import Mapping

from torch import Tensor

from verl_rc.algorithm.losses import clipped, policy_gradient, selection  # noqa: F401  (they bind functions to names)
from verl_rc.algorithm.losses.aggregate import Aggregation, token_mean
from verl_rc.algorithm.losses.inputs import (
    LossMetrics,
    MiniBatchStatistics,
    PolicyLossInputs,
    clean_policy_loss_inputs,
    loss_options,
    read_loss_options,
    resolve_policy_loss,
)
from verl_rc.config.algorithms import LossAggregation, RatioOptions
from verl_rc.tensor_ops import kl_penalty


def compute_policy_loss(  # noqa: PLR0913 - a public entry point, called with keywords
    name: str,
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    response_mask: Tensor | None = None,
    denominator_mask: Tensor | None = None,
    rollout_is_weights: Tensor | None = None,
    config: Mapping[str, object] | RatioOptions | None = None,
    aggregation: LossAggregation | Aggregation = "token-mean",
    mini_batch_statistics: MiniBatchStatistics | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Compute a policy loss and its metrics for one micro-batch.

    Args:
        name: a registered loss (``policy_loss_names``) or ``module:function``.
        old_log_probs: [B, T], nats; of the policy in the denominator of the ratio.
        log_probs: [B, T], nats; of the policy being updated; the gradient flows here and nowhere else.
        advantages: [B, T].
        loss_mask: [B, T], bool or 0/1; response tokens that rejection kept.
        response_mask: [B, T]; all response tokens, ``loss_mask`` when None. Ratios of whole sequences
            (``gspo``, ``geo_mean``) are computed over it, so that rejecting a token does not change them.
        denominator_mask: [B, T]; tokens counted in denominators that ``aggregation`` leaves open;
            ``response_mask`` when None, which keeps the gradient of a kept token independent of the
            acceptance rate.
        rollout_is_weights: [B, T], dimensionless; multiplies each token's loss and is detached here.
        config: the section ``actor_rollout_ref.actor``, a mapping with its keys, ``LossOptions``, or None.
        aggregation: a mode's name, or the record with the mini-batch's denominators.
        mini_batch_statistics: for losses that read the whole mini-batch; computed from the tensors given
            when None.

    Returns:
        The loss, 0-d, and the metrics as mergeable means.

    Raises:
        ValueError: for an unknown name, unequal shapes, a number outside its range, or a function that
            returns anything else.
    """
    response_mask = loss_mask if response_mask is None else response_mask
    inputs = PolicyLossInputs(
        ratio_denominator=old_log_probs,
        log_probs=log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        response_mask=response_mask,
        denominator_mask=response_mask if denominator_mask is None else denominator_mask,
        rollout_is_weights=rollout_is_weights,
        parameters=loss_options(config)
        if isinstance(config, RatioOptions)
        else read_loss_options(config or {}),
        aggregation=Aggregation.from_name(aggregation),
        mini_batch_statistics=mini_batch_statistics,
    )
    returned: object = resolve_policy_loss(name)(clean_policy_loss_inputs(inputs))
    match returned:
        case (Tensor() as loss, dict() as metrics):
            return loss, metrics
    raise ValueError(
        f"the policy loss {name!r} must return the loss and its metrics, which may be {{}}; it returns a "
        f"{type(returned).__name__}"
    )


def compute_entropy_loss(
    entropy: Tensor,
    loss_mask: Tensor,
    denominator_mask: Tensor | None = None,
    aggregation: LossAggregation | Aggregation = "token-mean",
) -> Tensor:
    """Aggregate the policy's entropy; subtract it, times ``entropy_coeff``, from the policy loss to raise
    entropy.

    Args:
        entropy: [B, T], nats; of the distribution at each position; carries the gradient.
        loss_mask: [B, T], bool or 0/1; response tokens that rejection kept.
        denominator_mask: [B, T]; tokens counted in denominators that ``aggregation`` leaves open;
            ``loss_mask`` when None.
        aggregation: a mode's name, or the record with the mini-batch's denominators.

    Returns:
        The aggregated entropy, 0-d, nats.

    Raises:
        ValueError: when shapes differ.
    """
    return Aggregation.from_name(aggregation).reduce(entropy, loss_mask.bool(), denominator_mask)


def compute_kl_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    kind: str,
    loss_mask: Tensor,
    denominator_mask: Tensor | None = None,
    aggregation: LossAggregation | Aggregation = "token-mean",
) -> tuple[Tensor, LossMetrics]:
    """Aggregate an estimate of KL(current ‖ reference); add it, times ``kl_loss_coef``, to the policy loss.

    Args:
        log_probs: [B, T], nats; of the policy being updated; carries the gradient.
        ref_log_probs: [B, T], nats; of the reference policy.
        kind: an estimator of ``kl_penalty`` (``actor_rollout_ref.actor.kl_loss_type``).
        loss_mask: [B, T], bool or 0/1; response tokens that rejection kept. NaN outside is harmless.
        denominator_mask: [B, T]; tokens counted in denominators that ``aggregation`` leaves open;
            ``loss_mask`` when None.
        aggregation: a mode's name, or the record with the mini-batch's denominators.

    Returns:
        The aggregated divergence, 0-d, nats, and ``actor/kl_loss`` (mean over ``loss_mask``).

    Raises:
        ValueError: for an unknown estimator, or when shapes differ.
    """
    kept = loss_mask.bool()
    # Cut before the difference: on padding both may be −inf, and −inf − −inf is NaN, in the gradient too.
    divergence = kl_penalty(log_probs.where(kept, 0), ref_log_probs.detach().where(kept, 0), kind)
    total = Aggregation.from_name(aggregation).reduce(divergence, kept, denominator_mask)
    return total, {"actor/kl_loss": token_mean(divergence, kept)}
