"""The policy gradient weighted by a clipped, detached ratio."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def cispo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Clipped importance-sampling policy optimisation (CISPO, arXiv:2506.13585); the loss mode ``cispo``.

    ``−w sg(clip(r, 1 − ε_low, 1 + ε_high)) A lp`` with r = current / old: a clipped token keeps a gradient. A rejected
    token leaves the sum.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of tokens with r outside the band), `actor/pg_clipfrac_lower` (0),
        those of `ppo_kl_metrics`.
    """
    ratio = inputs.log_ratio.detach().exp()
    clipped_ratio = ratio.clamp(1 - inputs.parameters.clip_ratio_low, 1 + inputs.parameters.clip_ratio_high)
    return inputs.reduce(-clipped_ratio * inputs.advantages * inputs.log_probs), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(ratio != clipped_ratio),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(torch.zeros_like(ratio)),
    }
