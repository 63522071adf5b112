"""The geometric mean of a sequence's clipped token ratios."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs
from verl_rc.tensor_ops import masked_row_sums

WEIGHT_FLOOR = 1e-10
"""Added to importance weights before their logarithm is taken."""


def geo_mean_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Geometric-mean policy optimisation (GMPO, arXiv:2507.20673); the loss mode ``geo_mean``.

    Per row ``−mean(A) · exp(mean(d'))`` with d = log(current / old) and d' = d cut to ε_high from above where A > 0 and
    to −ε_low from below where A < 0; then the mean over rows, whatever the aggregation's mode.

    Both means run over `response_mask`, so rejecting a token does not change the ratio: the token only loses its
    gradient. A row with every token rejected leaves the sum. The row's importance weight is exp(mean(log(w + 1e-10)))
    over kept tokens; a token whose weight is 0 (outside an IcePop band) counts as rejected, where the formula taken
    literally would shrink the whole row.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` (share of tokens with d outside [−ε_low, ε_high] and A > 0),
        `actor/pg_clipfrac_lower` (the same with A < 0), those of `ppo_kl_metrics`.
    """
    kept, weights = inputs.loss_mask, inputs.rollout_is_weights
    if weights is not None:
        kept = kept & (weights > 0)
    log_ratio = inputs.log_ratio
    log_ratio = log_ratio.where(kept, log_ratio.detach())
    clamped = log_ratio.clamp(-inputs.parameters.clip_ratio_low, inputs.parameters.clip_ratio_high)
    sign = inputs.advantages.sign()
    pessimistic = sign * torch.minimum(sign * log_ratio, sign * clamped)
    row_loss = -_row_mean(inputs.advantages, inputs.response_mask) * _row_mean(pessimistic, inputs.response_mask).exp()
    if weights is not None:
        row_loss = row_loss * _row_mean((weights + WEIGHT_FLOOR).log(), kept).exp()
    loss = inputs.aggregation.with_mode("seq-mean-token-sum").reduce(
        row_loss, kept.any(dim=-1, keepdim=True), inputs.denominator_mask.any(dim=-1, keepdim=True)
    )
    outside = log_ratio.detach() != clamped.detach()
    return loss, {
        "actor/pg_clipfrac": inputs.mean_over_tokens(outside & (inputs.advantages > 0)),
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": inputs.mean_over_tokens(outside & (inputs.advantages < 0)),
    }


def _row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over each row's tokens in `mask`: [B, 1]; 0 for a row without any."""
    return (masked_row_sums(values, mask) / mask.sum(dim=-1).clamp(min=1)).unsqueeze(-1)
