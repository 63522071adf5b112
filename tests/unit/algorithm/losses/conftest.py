"""Batches for the tests of the losses."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor


@dataclass(frozen=True)
class ExampleBatch:
    """Random tensors of one mini-batch, float64, [B, T], with gaps in the responses and rejected tokens."""

    old_log_probs: Tensor
    log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_mask: Tensor
    weights: Tensor

    def policy_loss_arguments(self) -> dict[str, Tensor]:
        """The arguments of `compute_policy_loss` under their names."""
        return {
            "old_log_probs": self.old_log_probs,
            "log_probs": self.log_probs,
            "advantages": self.advantages,
            "loss_mask": self.loss_mask,
            "response_mask": self.response_mask,
            "rollout_is_weights": self.weights,
        }


@pytest.fixture
def make_batch() -> Callable[..., ExampleBatch]:
    """A function that makes a batch from a seed; row 2 is rejected as a whole, row 3 is padding."""

    def make(seed: int = 0, rows: int = 6, length: int = 7) -> ExampleBatch:
        generator = torch.Generator().manual_seed(seed)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(rows, length, generator=generator, dtype=torch.float64)

        response_mask = uniform(0, 1) < 0.8
        response_mask[:, 0] = True
        response_mask[3] = False
        loss_mask = response_mask & (uniform(0, 1) < 0.7)
        loss_mask[0, 0] = True
        loss_mask[2] = False
        old_log_probs = uniform(-3, -0.1)
        return ExampleBatch(
            old_log_probs=old_log_probs,
            log_probs=(old_log_probs + uniform(-0.8, 0.8)).clamp(max=-0.01),
            advantages=(uniform(-2, 2)[:, :1]).expand(rows, length).clone(),
            response_mask=response_mask,
            loss_mask=loss_mask,
            weights=uniform(0.2, 2),
        )

    return make
