"""Distillation: a divergence of the current policy from a teacher on tokens that the policy sampled."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.algorithm.losses.inputs import LossMetrics, PolicyLossInputs, resolve_policy_loss
from verl_rc.tensor_ops import kl_penalty


@dataclass(frozen=True)
class TopTokens:
    """The W tokens that the teacher finds most likely in each token's place."""

    teacher_log_probs: Tensor
    """[B, T, W], nats; constants."""
    log_probs: Tensor
    """[B, T, W], nats, of the current policy; with gradient."""
    lowest: float | None = None
    """Lower bound of the log-probs of both, nats. None for no bound."""

    def divergence(self, kept: Tensor) -> Tensor:
        """``Σ π_T (log π_T − log π)`` over these tokens, at least 0: KL(teacher ‖ current) but for the rest
        of the vocabulary. It is verl's ``forward_kl_topk``, which does not renormalise.

        A token that either policy cannot draw adds nothing, unless ``lowest`` says how unlikely it is.
        Returns [B, T], nats, 0 where ``kept`` (bool [B, T]) is False.
        """
        teacher, current = self.teacher_log_probs.detach(), self.log_probs
        if self.lowest is not None:
            teacher, current = teacher.clamp_min(self.lowest), current.clamp_min(self.lowest)
        # Cut before the product, for 0 times NaN is NaN. A kept token's NaN is not cut: it must be seen.
        counts = kept[..., None] & (teacher != -torch.inf) & (current != -torch.inf)
        teacher, current = teacher.where(counts, 0), current.where(counts, 0)
        return (teacher.exp() * (teacher - current)).sum(dim=-1).clamp_min(0.0)


def compute_distillation_loss(
    inputs: PolicyLossInputs,
    teacher_log_probs: Tensor,
    kind: str,
    max_clamp: float | None = None,
    policy_loss: str | None = None,
    top_tokens: TopTokens | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Compute the teacher's term of the loss and its metrics for one micro-batch.

    With d the ``kind`` estimate of KL(current ‖ teacher) of a token, or the divergence of ``top_tokens``,
    clamped to ± ``max_clamp``, importance weights w and ``inputs.aggregation``:

    - with ``policy_loss``: that loss, of the advantage −d, a constant (with k1 it is log π_T − log π, of the
      current policy at every update);
    - without: Σ w d, differentiated through the current log-probs.

    Args:
        inputs: cleaned; its advantages are not read.
        teacher_log_probs: [B, T], nats; a constant. NaN outside ``loss_mask`` is harmless.
        kind: an estimator of ``kl_penalty`` (``distillation.distillation_loss.loss_mode``); not read beside
            ``top_tokens``.
        max_clamp: nats, > 0. None means no bound.
        policy_loss: a registered loss that selects no tokens. None means the divergence itself is the loss.
        top_tokens: for ``forward_kl_topk``. None if the sampled token is looked at alone.

    Returns:
        The loss, 0-d, and ``distillation/*``: means over ``loss_mask``.

    Raises:
        ValueError: for an unknown estimator or loss.
    """
    kept = inputs.loss_mask
    # Cut before the difference, as in the KL loss: on padding both may be −inf.
    current, teacher = inputs.log_probs.where(kept, 0), teacher_log_probs.detach().where(kept, 0)
    divergence = kl_penalty(current, teacher, kind) if top_tokens is None else top_tokens.divergence(kept)
    bounded = divergence if max_clamp is None else divergence.clamp(-max_clamp, max_clamp)
    metrics = {
        "distillation/reverse_kl": inputs.mean_over_tokens(current - teacher),
        "distillation/abs_loss": inputs.mean_over_tokens(divergence.abs()),
    }
    if max_clamp is not None:
        metrics["distillation/clamped_fraction"] = inputs.mean_over_tokens(divergence.abs() > max_clamp)
    if top_tokens is not None:
        masses = {"student": top_tokens.log_probs.detach(), "teacher": top_tokens.teacher_log_probs}
        for owner, log_probs in masses.items():
            metrics[f"distillation/{owner}_mass"] = inputs.mean_over_tokens(log_probs.exp().sum(dim=-1))
    if policy_loss is None:
        return inputs.reduce(bounded), metrics
    loss, averages = resolve_policy_loss(policy_loss)(replace(inputs, advantages=-bounded.detach()))
    return loss, metrics | {
        f"distillation/{name.removeprefix('actor/')}": mean for name, mean in averages.items()
    }
