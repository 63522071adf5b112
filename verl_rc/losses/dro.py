"""The quadratic penalty of direct reward optimisation."""

from __future__ import annotations

from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def dro_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Direct reward optimisation (DRO, arXiv:2405.19107); the loss mode ``dro``.

    ``−w (A lp − β/2 (lp − lp_old)²)`` with β = `dro_beta`; the weight multiplies the penalty too. A rejected token
    leaves the sum.

    Returns:
        The loss, 0-d, and `actor/ppo_kl` (mean of old − current, nats).

    Raises:
        ValueError: when `dro_beta` is not set.
    """
    beta = inputs.parameters.dro_beta
    if beta is None:
        raise ValueError("the loss 'dro' needs actor_rollout_ref.actor.policy_loss.dro_beta > 0, got None")
    log_ratio = inputs.log_probs - inputs.old_log_probs  # unclamped: the penalty must pull back what has gone far
    return inputs.reduce(0.5 * beta * log_ratio.square() - inputs.advantages * inputs.log_probs), {
        "actor/ppo_kl": inputs.mean_over_tokens(-log_ratio)
    }
