"""Clipping of the ratio of whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs

LOG_SEQUENCE_RATIO_MAX = 10.0
"""Upper bound, in nats, of the log of a sequence's ratio."""


def gspo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """The clipped surrogate on the ratio of a whole sequence (GSPO, arXiv:2507.18071); the loss mode ``gspo``.

    s = exp(mean over the row of log(current / old)); per token log s_t = lp − sg(lp) + sg(log s), so that every token
    carries the row's ratio and its own gradient; ``w · max(−A s_t, −A clip(s_t, 1 − ε_low, 1 + ε_high))``. The mean
    runs over `response_mask`: rejecting a token removes its term and leaves s as it is. Weights multiply per token.
    The paper averages ``seq-mean-token-mean``; here the mode asked for is used.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of tokens whose clipped branch is the larger one),
        `actor/pg_clipfrac_lower` (0), `actor/ppo_kl` (mean of old − current, nats).
    """
    row_tokens = inputs.response_mask.sum(dim=-1, keepdim=True).clamp(min=1)
    log_ratio = inputs.log_probs - inputs.old_log_probs
    log_sequence_ratio = log_ratio.detach().sum(dim=-1, keepdim=True) / row_tokens
    own_gradient = inputs.log_probs - inputs.log_probs.detach()
    ratio = (own_gradient + log_sequence_ratio).clamp(max=LOG_SEQUENCE_RATIO_MAX).exp()
    clipped_ratio = ratio.clamp(1 - inputs.parameters.clip_ratio_low, 1 + inputs.parameters.clip_ratio_high)
    unclipped, clipped = -inputs.advantages * ratio, -inputs.advantages * clipped_ratio
    return inputs.reduce(torch.maximum(unclipped, clipped)), {
        "actor/pg_clipfrac": inputs.mean_over_tokens(clipped > unclipped),
        "actor/ppo_kl": inputs.mean_over_tokens(-log_ratio),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(torch.zeros_like(clipped)),
    }
