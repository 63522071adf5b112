"""The clipped surrogate of PPO with the second clip for negative advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def ppo_clip_token_loss(inputs: PolicyLossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the clipped surrogate of every token.

    ``max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high))``, and for A < 0 at most ``−A c``, with r = current / old.

    Returns:
        The token losses [B, T]; where the clipped branch is the larger one, bool [B, T]; where the bound c acts,
        bool [B, T].
    """
    parameters = inputs.parameters
    ratio = inputs.log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - parameters.clip_ratio_low, 1 + parameters.clip_ratio_high)
    unclipped, clipped = -inputs.advantages * ratio, -inputs.advantages * clipped_ratio
    surrogate, bound = torch.maximum(unclipped, clipped), -inputs.advantages * parameters.clip_ratio_c
    negative = inputs.advantages < 0
    token_loss = torch.where(negative, torch.minimum(surrogate, bound), surrogate)
    return token_loss, clipped > unclipped, negative & (surrogate > bound)


def ppo_clip_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate (PPO, arXiv:1707.06347) with dual clip (arXiv:1912.09729); the loss mode ``vanilla``.

    ``w · max(−A r, −A clip(r, 1 − ε_low, 1 + ε_high))``, and for A < 0 at most ``−w A c``. The importance weight w
    multiplies after clipping. A rejected token leaves the sum and changes no other token's term.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of tokens whose clipped branch is the larger one),
        `actor/pg_clipfrac_lower` (share of tokens where c acts), those of `ppo_kl_metrics`.
    """
    token_loss, clipped, bounded = ppo_clip_token_loss(inputs)
    return inputs.reduce(token_loss), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(clipped),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(bounded),
    }
