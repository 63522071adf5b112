"""Distillation: a divergence of the current policy from a teacher on tokens that the policy sampled."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs, resolve_policy_loss
from verl_rc.tensor_ops import kl_penalty


def compute_distillation_loss(
    inputs: PolicyLossInputs,
    teacher_log_probs: Tensor,
    kind: str,
    max_clamp: float | None = None,
    policy_loss: str | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Compute the teacher's term of the loss and its metrics for one micro-batch.

    With d the ``kind`` estimate of KL(current ‖ teacher) of a token, clamped to ± ``max_clamp``, importance
    weights w and ``inputs.aggregation``:

    - with ``policy_loss``: that loss, of the advantage −d, a constant (with k1 it is log π_T − log π, of the
      current policy at every update);
    - without: Σ w d, differentiated through the current log-probs.

    Args:
        inputs: cleaned; its advantages are not read.
        teacher_log_probs: [B, T], nats; a constant. NaN outside ``loss_mask`` is harmless.
        kind: an estimator of ``kl_penalty`` (``distillation.distillation_loss.loss_mode``).
        max_clamp: nats, > 0; None: no bound.
        policy_loss: a registered loss that selects no tokens; None: the divergence itself is the loss.

    Returns:
        The loss, 0-d, and ``distillation/*``: means over ``loss_mask``.

    Raises:
        ValueError: for an unknown estimator or loss.
    """
    kept = inputs.loss_mask
    # Cut before the difference, as in the KL loss: on padding both may be −inf.
    current, teacher = inputs.log_probs.where(kept, 0), teacher_log_probs.detach().where(kept, 0)
    divergence = kl_penalty(current, teacher, kind)
    bounded = divergence if max_clamp is None else divergence.clamp(-max_clamp, max_clamp)
    metrics = {
        "distillation/reverse_kl": inputs.mean_over_tokens(current - teacher),
        "distillation/abs_loss": inputs.mean_over_tokens(divergence.abs()),
    }
    if max_clamp is not None:
        metrics["distillation/clamped_fraction"] = inputs.mean_over_tokens(divergence.abs() > max_clamp)
    if policy_loss is None:
        return inputs.reduce(bounded), metrics
    loss, averages = resolve_policy_loss(policy_loss)(replace(inputs, advantages=-bounded.detach()))
    return loss, metrics | {
        f"distillation/{name.removeprefix('actor/')}": mean for name, mean in averages.items()
    }
