"""Score centering: the policy loss of a token less what the sampler expects it to be at that place.

Under a sampler q and a trainer p the expected update at a prefix is ``E_q[A] E_q[∇l] + Cov_q(A, ∇l)``, where
A ∇l is the gradient of a token's loss. For q = p and ``l = -log p`` the first term is 0. Else it is a drift
towards the sampler, whatever the rewards are. Subtracting ``Σ_v q(v) l(v)`` with the same A cancels it
(arXiv:2609.20807; with weights and clips the expectation is of the loss that they make: prime-rl's IPO,
vime). In decoupled mode it does so in a step's first update: the sampler says nothing about the proximal
policy of a token that it has not drawn, so that its ratio is taken as 1, as it is in that update.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_rc.algorithm.losses.aggregate import token_mean
from verl_rc.algorithm.losses.inputs import PolicyLoss, PolicyLossInputs
from verl_rc.metrics.mergeable import Mean

SMALLEST_TAIL = 1e-6
"""Smallest mass outside the head that is centered: sums of probabilities in float32 are not more precise."""


@dataclass(frozen=True)
class SamplerHead:
    """The sampler's C most likely tokens in each token's place, under both policies."""

    rollout_log_probs: Tensor
    """[B, T, C], nats; constants. -inf where there are fewer than C."""
    log_probs: Tensor
    """[B, T, C], nats, of the policy being updated; with gradient."""
    has_tail: bool = False
    """Whether the last of the C are all other tokens as one."""

    @property
    def log_ratios(self) -> Tensor:
        """[B, T, C], nats; constants. 0 where a token is missing, or its log-prob is not finite."""
        ratios = self.log_probs.detach() - self.rollout_log_probs
        return ratios.where(ratios.isfinite(), 0)

    def with_tail(self) -> "SamplerHead":
        """The head, and behind it all other tokens as one, [B, T, C + 1]. Among these the sampler is taken as
        proportional to the policy being updated, so that one ratio holds for all, and the gradient of their
        sum is that of ``log(1 - P)``."""
        is_head = self.rollout_log_probs.isfinite()
        q_tail, p_tail = (
            1 - values.double().exp().where(is_head, 0).sum(dim=-1)
            for values in (self.rollout_log_probs, self.log_probs)
        )
        # A token without a head is not centered: it would be, by a tail that is everything.
        is_tail = is_head.any(dim=-1) & (q_tail > SMALLEST_TAIL) & (p_tail > SMALLEST_TAIL)
        q_log, p_log = (
            values.where(is_tail, 1.0).log().where(is_tail, -torch.inf)[..., None]
            for values in (q_tail, p_tail)
        )
        return SamplerHead(
            torch.cat([self.rollout_log_probs, q_log.to(self.rollout_log_probs.dtype)], dim=-1),
            torch.cat([self.log_probs, p_log.to(self.log_probs.dtype)], dim=-1),
            has_tail=True,
        )


def centering_term(
    loss: PolicyLoss,
    inputs: PolicyLossInputs,
    head: SamplerHead,
    *,
    divides_by_rollout: bool,
    weights: Tensor | None,
) -> tuple[Tensor, dict[str, Mean[Tensor]]]:
    """``-Σ_v q(v) l(v)``, averaged as the policy loss, and its metrics: add it to that loss.

    Args:
        loss: The policy loss; a token's share must depend on no other token.
        inputs: Cleaned; those of the policy loss, with denominators in the aggregation.
        head: The tokens v.
        divides_by_rollout: The loss's ratio divides by the rollout policy, as in bypass mode. Else it is 1
            for every v.
        weights: [B, T, C], constants: the importance weights of v (``candidate_weights``). A weight of the
            sampled token for all of them would bring a drift back. None: no weights.

    Returns the term, 0-d, with its gradient through ``head.log_probs``, and ``rollout_corr/*``: means over
    ``loss_mask``.
    """
    in_loss, q_log, p_log = inputs.loss_mask[..., None], head.rollout_log_probs.detach(), head.log_probs
    is_there = in_loss & q_log.isfinite() & p_log.detach().isfinite()
    q_log, p_log = q_log.where(is_there, 0), p_log.where(is_there, 0)
    q, p = q_log.exp().where(is_there, 0), p_log.detach().exp().where(is_there, 0)
    weighted = q if weights is None else q * weights.to(q.dtype).where(is_there, 0)
    columns = q.shape[-1]

    def rows(values: Tensor) -> Tensor:
        """``[B, T]`` or ``[B, T, C]`` as rows of their own, ``[C B, T]``."""
        return values.movedim(-1, 0).flatten(0, 1) if values.ndim == 3 else values.repeat(columns, 1)

    expected, _ = loss(
        replace(
            inputs,
            ratio_denominator=rows(q_log if divides_by_rollout else p_log.detach()),
            log_probs=rows(p_log),
            advantages=rows(inputs.advantages),
            loss_mask=rows(inputs.loss_mask),
            response_mask=rows(inputs.response_mask),
            denominator_mask=rows(inputs.denominator_mask),
            rollout_is_weights=rows(weighted),
            # A penalty without an advantage pulls p towards q on purpose.
            parameters=inputs.parameters.without_penalties(),
        )
    )
    head_mass = (q[..., :-1] if head.has_tail else q).sum(dim=-1)
    return -expected, {
        "rollout_corr/centering_head_mass": token_mean(head_mass, inputs.loss_mask),
        "rollout_corr/drift_norm": token_mean((q - p).square().sum(dim=-1).sqrt(), inputs.loss_mask),
    }
