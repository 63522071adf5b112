"""The divergence from the reference policy as part of the reward, and the control of its weight."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from verl_rc.tensor_ops import kl_penalty


def apply_kl_in_reward(
    token_level_scores: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    kl_coef: float,
    kind: str = "kl",
) -> tuple[Tensor, Tensor]:
    """Subtracts the estimated divergence from each response token's score (arXiv:1909.08593).

    r = s − β KL_t(policy ‖ reference) on response tokens; elsewhere r = s. NaN outside the response is harmless.

    Args:
        token_level_scores: [B, T], in units of reward.
        log_probs: [B, T], nats; of the policy that answered, as the trainer computes them.
        ref_log_probs: [B, T], nats; of the reference policy.
        response_mask: [B, T], bool or 0/1.
        kl_coef: β, in units of reward per nat.
        kind: an estimator of `kl_penalty` (`algorithm.kl_penalty`).

    Returns:
        Token-level rewards [B, T], and the divergence of each row, the mean over its response tokens, [B], nats;
        0 for a row without any.

    Raises:
        ValueError: for an unknown estimator, or when shapes differ.
    """
    tensors = (log_probs, ref_log_probs, response_mask)
    if token_level_scores.ndim != 2 or any(tensor.shape != token_level_scores.shape for tensor in tensors):
        raise ValueError(
            f"token_level_scores, log_probs, ref_log_probs and response_mask must be [B, T] of one shape; got "
            f"{tuple(token_level_scores.shape)} and {[tuple(tensor.shape) for tensor in tensors]}"
        )
    mask = response_mask.bool()
    divergence = kl_penalty(log_probs, ref_log_probs, kind).detach().where(mask, 0)
    return token_level_scores - kl_coef * divergence, divergence.sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)


@dataclass(frozen=True)
class KLController:
    """The weight β of the divergence, and how it follows what was observed (arXiv:1909.08593, section 2.2).

    A value: `updated` returns the next one. All of it belongs in a checkpoint (`dataclasses.asdict`).

    Attributes:
        kl_coef: β, in units of reward per nat, >= 0 (`algorithm.kl_ctrl.kl_coef`).
        target_kl: the divergence aimed at, nats per token, > 0; None keeps β fixed (`algorithm.kl_ctrl.type=fixed`).
        horizon: rows that a relative error of 1 would need to double β, > 0 (`algorithm.kl_ctrl.horizon`).
    """

    kl_coef: float
    target_kl: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        """Refuses a controller that could not control."""
        if self.kl_coef < 0:
            raise ValueError(f"algorithm.kl_ctrl.kl_coef must be >= 0, got {self.kl_coef}")
        if self.target_kl is not None and not self.target_kl > 0:
            raise ValueError(f"algorithm.kl_ctrl.target_kl must be > 0, got {self.target_kl}")
        if not self.horizon > 0:
            raise ValueError(f"algorithm.kl_ctrl.horizon must be > 0, got {self.horizon}")

    def updated(self, observed_kl: float, num_rows: int) -> KLController:
        """Returns the controller after a batch: β ← β (1 + clip(KL / target − 1, ±0.2) · rows / horizon).

        Args:
            observed_kl: nats per token; the mean over the batch's rows of `apply_kl_in_reward`'s divergence.
            num_rows: rows of the batch.
        """
        if self.target_kl is None:
            return self
        error = min(max(observed_kl / self.target_kl - 1, -0.2), 0.2)
        return replace(self, kl_coef=self.kl_coef * (1 + error * num_rows / self.horizon))
