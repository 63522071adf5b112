"""From current log-probs and a slice of the train batch to the loss that is differentiated."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from verl_rc.config.actor import ActorConfig
from verl_rc.data.batches import TrainBatch
from verl_rc.losses import Aggregation, LossMetric, compute_policy_loss


@dataclass(frozen=True)
class Objective:
    """The loss of one micro-batch: its share of the mini-batch's loss."""

    loss: Tensor
    """Scalar with a gradient; shares of all micro-batches and ranks add up to the mini-batch's loss."""
    terms: Mapping[str, Tensor]
    """Detached shares by metric name (``actor/pg_loss``, …); they add up likewise."""
    averages: Mapping[str, LossMetric]
    """Detached sums and counts by metric name; the metric is the quotient of their totals."""


def policy_objective(
    log_probs: Tensor,
    entropys: Tensor | None,
    batch: TrainBatch,
    config: ActorConfig,
    totals: Aggregation,
    denominator: str = "original",
) -> Objective:
    """Policy loss minus the entropy bonus, over ``loss_mask``, divided by the mini-batch's ``totals``.

    ``L = L_policy - entropy_coeff * agg(entropy)``; ``log_probs`` and ``entropys`` are float32 ``[B, R]`` with gradient.
    ``denominator``: ``original`` or ``kept``, the tokens that count in the denominators of single rows; ``totals`` must have
    been counted likewise.
    """
    denominator_mask = batch.loss_mask if denominator == "kept" else batch.response_mask
    policy_loss, averages = compute_policy_loss(
        config.policy_loss.loss_mode,
        old_log_probs=batch.old_log_probs,
        log_probs=log_probs,
        advantages=batch.advantages,
        loss_mask=batch.loss_mask,
        response_mask=batch.response_mask,
        denominator_mask=denominator_mask,
        rollout_is_weights=batch.rollout_is_weights,
        config=config,
        aggregation=totals,
    )
    loss = policy_loss
    terms = {"actor/pg_loss": policy_loss.detach()}
    if entropys is not None and config.entropy_coeff != 0:
        entropy = totals.reduce(entropys, batch.loss_mask, denominator_mask)
        loss = loss - config.entropy_coeff * entropy
        terms["actor/entropy_loss"] = entropy.detach()
    terms["actor/loss"] = loss.detach()
    return Objective(loss, terms, averages)
