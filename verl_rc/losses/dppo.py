"""Trust regions in the divergence of probabilities instead of ratio clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def dppo_tv_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Divergence PPO with total variation (DPPO, arXiv:2602.04879); the loss mode ``dppo_tv``.

    ``−w A sg(min(r, c)) lp M`` with M = [π − π_old ≤ ε_high] for A > 0 and [π − π_old ≥ −ε_low] otherwise; π are
    probabilities of the sampled token and c is `clip_ratio_c` (the paper uses 20). A rejected token leaves the sum.

    Returns:
        The loss, 0-d, and the metrics of `_masked_policy_gradient`.
    """
    change = inputs.log_probs.detach().exp() - inputs.old_log_probs.exp()
    low, high = inputs.parameters.clip_ratio_low, inputs.parameters.clip_ratio_high
    return _masked_policy_gradient(inputs, torch.where(inputs.advantages > 0, change <= high, change >= -low))


def dppo_kl_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Divergence PPO with the binary KL divergence (DPPO, arXiv:2602.04879); the loss mode ``dppo_kl``.

    As `dppo_tv_loss`, with KL = π_old log(π_old / π) + (1 − π_old) log((1 − π_old) / (1 − π)), in nats, and
    M = [KL ≤ ε_high or π ≤ π_old] for A > 0, [KL ≤ ε_low or π ≥ π_old] otherwise: only moves in the direction that the
    advantage pushes are limited.

    Returns:
        The loss, 0-d, and the metrics of `_masked_policy_gradient`.
    """
    current, old = inputs.log_probs.detach(), inputs.old_log_probs
    rest, old_rest = -torch.expm1(current), -torch.expm1(old)
    tiny = torch.finfo(rest.dtype).tiny
    divergence = old.exp() * (old - current) + torch.xlogy(old_rest, old_rest / rest.clamp(min=tiny))
    raised = (divergence <= inputs.parameters.clip_ratio_high) | (current <= old)
    lowered = (divergence <= inputs.parameters.clip_ratio_low) | (current >= old)
    return _masked_policy_gradient(inputs, torch.where(inputs.advantages > 0, raised, lowered))


def _masked_policy_gradient(inputs: PolicyLossInputs, trusted: Tensor) -> tuple[Tensor, LossMetrics]:
    """Policy gradient of the tokens inside the trust region, weighted by the detached ratio up to c.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of tokens outside the region), `actor/pg_clipfrac_lower` (share
        inside it with r > c), those of `ppo_kl_metrics`.
    """
    ratio, cap = inputs.log_ratio.detach().exp(), inputs.parameters.clip_ratio_c
    token_loss = -inputs.advantages * ratio.clamp(max=cap) * inputs.log_probs
    return inputs.reduce(token_loss.where(trusted, 0)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(~trusted),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(trusted & (ratio > cap)),
    }
