"""The result of one optimizer step: ranks report it; ledger, guards and metrics read it."""

import math
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["trained", "nonfinite", "overflow"]


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a model, over all ranks."""

    grad_norm: float
    """Norm of the whole gradient before clipping, without the scale of the loss."""
    loss_scale: float | None = None
    """Factor of the loss in float16; None in other precisions."""

    @property
    def outcome(self) -> Outcome:
        """The account of the ledger that the step's tokens belong to: ``trained`` where the step was taken.

        A gradient that is not finite is an ``overflow`` while the loss scale is above 1, else
        ``nonfinite``.
        """
        if math.isfinite(self.grad_norm):
            return "trained"
        return "nonfinite" if self.loss_scale is None or self.loss_scale <= 1.0 else "overflow"
