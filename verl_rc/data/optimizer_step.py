"""What became of one optimizer step: ranks report it; ledger, guards and metrics read it."""

import math
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["trained", "nonfinite"]


@dataclass(frozen=True)
class OptimizerStep:
    """One optimizer step of a model, over all ranks."""

    grad_norm: float
    """Norm of the whole gradient before clipping."""

    @property
    def outcome(self) -> Outcome:
        """The account of the ledger that the step's tokens belong to: ``trained`` where the step was
        taken."""
        return "trained" if math.isfinite(self.grad_norm) else "nonfinite"
