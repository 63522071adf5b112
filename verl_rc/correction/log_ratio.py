"""Log-ratios of two policies on sampled tokens: train minus rollout, never the other sign."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_rc.config.rollout_correction import RolloutCorrectionConfig
from verl_rc.tensor_ops import masked_row_sums

SAFETY_BOUND = 20.0
"""Log-ratios (or their sums) are bounded by ±20 before exp: e^20 = 4.85e8."""


@dataclass(frozen=True)
class LogRatio:
    """``log pi_train - log pi_rollout`` and what it is read with."""

    values: Tensor
    """float32 or float64 ``[B, T]``, nats, unbounded; 0 where ``valid`` is False."""
    valid: Tensor
    """bool ``[B, T]``: response tokens with two finite log-probs."""
    response_mask: Tensor
    """bool ``[B, T]``."""
    rejected: Tensor
    """bool ``[B, T]``: response tokens that the policy for non-finite log-probs rejects."""

    @property
    def bounded(self) -> Tensor:
        """Token log-ratios within ±``SAFETY_BOUND``."""
        return self.values.clamp(-SAFETY_BOUND, SAFETY_BOUND)

    @property
    def row_counts(self) -> Tensor:
        """Valid tokens of each row ``[B]``."""
        return self.valid.sum(dim=-1)

    @property
    def row_sums(self) -> Tensor:
        """Sum of each row's unbounded token log-ratios ``[B]``."""
        return self.values.sum(dim=-1)

    def row_means(self, values: Tensor) -> Tensor:
        """Mean of ``values`` ``[B, T]`` over each row's valid tokens ``[B]``; 0 for a row without any."""
        return masked_row_sums(values, self.valid) / self.row_counts.clamp_min(1)


def log_ratio(
    train_log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, config: RolloutCorrectionConfig
) -> LogRatio:
    """Log-ratios of the response tokens; no gradient flows through them.

    A token whose log-prob is not finite in either policy takes part in no statistic; ``config.nonfinite_logprob``
    decides whether
    it, or its whole row, is rejected (never given the largest weight). Raises ``ValueError`` when shapes differ or
    the mask is not boolean.
    """
    if not train_log_probs.shape == rollout_log_probs.shape == response_mask.shape or train_log_probs.ndim != 2:
        raise ValueError(
            "train_log_probs, rollout_log_probs and response_mask must have one shape [B, T], got "
            f"{list(train_log_probs.shape)}, {list(rollout_log_probs.shape)} and {list(response_mask.shape)}."
        )
    mask = response_mask.bool()
    train, rollout = train_log_probs.detach(), rollout_log_probs.detach()
    finite = torch.isfinite(train) & torch.isfinite(rollout)
    valid = mask & finite
    values = torch.where(valid, train, 0.0) - torch.where(valid, rollout, 0.0)
    nonfinite = mask & ~finite
    if config.nonfinite_logprob == "neutral":
        rejected = torch.zeros_like(mask)
    elif config.nonfinite_logprob == "reject_token":
        rejected = nonfinite
    else:
        rejected = nonfinite.any(dim=-1, keepdim=True) & mask
    return LogRatio(values, valid, mask, rejected)
