"""A smooth gate in the place of clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_rc.losses.inputs import LossMetrics, PolicyLossInputs


def sapo_loss(inputs: PolicyLossInputs) -> tuple[Tensor, LossMetrics]:
    """Soft adaptive policy optimisation (SAPO, arXiv:2511.20347); the loss mode ``sapo``.

    ``−w A (4 / τ) sigmoid(τ (r − 1))`` with r = current / old and τ = `tau_pos` for A > 0, else `tau_neg`; its slope at
    r = 1 is that of the unclipped surrogate. Always averaged ``seq-mean-token-mean``, as the paper defines it. A
    rejected token leaves the sum.

    Returns:
        The loss, 0-d, and `actor/pg_clipfrac` and `actor/pg_clipfrac_lower` (both 0: nothing is clipped),
        those of `ppo_kl_metrics`.
    """
    ratio = inputs.log_ratio.exp()
    positive = ratio.new_full((), inputs.parameters.tau_pos)
    temperature = positive.where(inputs.advantages > 0, ratio.new_full((), inputs.parameters.tau_neg))
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    none_clipped = inputs.mean_over_tokens(torch.zeros_like(ratio))
    loss = inputs.reduce(-inputs.advantages * gate, inputs.aggregation.with_mode("seq-mean-token-mean"))
    return loss, {
        "actor/pg_clipfrac": none_clipped,
        **inputs.ppo_kl_metrics(),
        "actor/pg_clipfrac_lower": none_clipped,
    }
