"""The importance-weighted policy gradient of bypass mode."""

from __future__ import annotations

from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def reinforce_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """REINFORCE (Williams 1992) with detached importance weights; the loss mode ``reinforce``.

    ``−A lp sg(w)`` with w of current over rollout; its gradient is −A w ∇lp, the importance-weighted policy gradient
    (Degris et al. 2012, arXiv:1205.4839). Without weights w = 1. No clipping. A rejected token leaves the sum.
    `old_log_probs` are the rollout's and serve the metric only.

    Returns:
        The loss, 0-d, and `actor/ppo_kl` (mean of old − current, nats).
    """
    loss = inputs.reduce(-inputs.advantages * inputs.log_probs)
    return loss, {"actor/ppo_kl": inputs.mean_over_tokens(inputs.old_log_probs - inputs.log_probs)}
