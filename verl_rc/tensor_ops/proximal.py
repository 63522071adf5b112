"""The proximal policy's log-probs without a forward pass of it: between those of rollout and current policy."""

import torch
from torch import Tensor


def interpolate_proximal(
    rollout_log_probs: Tensor,
    current_log_probs: Tensor,
    policy_versions: Tensor,
    proximal_version: int,
    current_version: int,
) -> Tensor:
    """``log pi_prox = (1 - a) log pi_rollout + a log pi_theta``, ``a = (v_prox - v_rollout) / (v_theta - v_rollout)`` in [0, 1].

    All ``[B, T]``, log-probs in nats; ``policy_versions`` int: version of the weights that sampled each token. ``a`` is 0 where
    the current weights sampled the token. No gradient flows through the result, which has the type of ``current_log_probs``.
    The approximation takes log-probs to move evenly from update to update (A-3PO, arXiv:2512.06547). Where rollouts are never
    older than the proximal policy, as in a run of this trainer, ``a`` is 0 and the result are the rollout log-probs: bypass mode.
    Raises ``ValueError`` when shapes differ or ``proximal_version`` is above ``current_version``.
    """
    if not rollout_log_probs.shape == current_log_probs.shape == policy_versions.shape:
        raise ValueError(
            "rollout_log_probs, current_log_probs and policy_versions must have one shape [B, T]; got "
            f"{list(rollout_log_probs.shape)}, {list(current_log_probs.shape)} and {list(policy_versions.shape)}"
        )
    if proximal_version > current_version:
        raise ValueError(f"proximal_version must not be above current_version={current_version}; got {proximal_version}")
    dtype = torch.promote_types(current_log_probs.dtype, torch.float32)
    rollout, current = rollout_log_probs.detach().to(dtype), current_log_probs.detach().to(dtype)
    updates = (current_version - policy_versions).to(dtype)
    share = ((proximal_version - policy_versions).to(dtype) / updates.clamp_min(1.0)).clamp(0.0, 1.0)
    mixed = torch.lerp(rollout, current, share)
    return torch.where(share == 0, rollout, mixed).to(current_log_probs.dtype)
