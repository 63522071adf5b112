"""Stopping a run whose gradients are NaN or infinite."""

import math
from collections import Counter
from collections.abc import Iterable


class NonFiniteGradientsError(RuntimeError):
    """Too many gradients in a row were not finite."""


class NonFiniteUpdateGuard:
    """Counts optimizer steps in a row that were left out because their gradient was NaN or infinite."""

    def __init__(self, limit: int) -> None:
        """``limit``: ``trainer.max_nonfinite_updates``."""
        self._limit = limit
        self.in_a_row: Counter[str] = Counter()
        """By role: how many were left out since the last one that was not; belongs in a checkpoint."""

    def observe(self, role: str, grad_norms: Iterable[float]) -> None:
        """Take the gradient norms of a role's optimizer steps in, in their order.

        Raises ``NonFiniteGradientsError`` at the limit.
        """
        for norm in grad_norms:
            self.in_a_row[role] = 0 if math.isfinite(norm) else self.in_a_row[role] + 1
            if self.in_a_row[role] >= self._limit:
                raise NonFiniteGradientsError(
                    f"the {role}'s gradients must be finite, but those of {self._limit} optimizer steps in a row were NaN or "
                    "infinite. They were left out, so the weights are as before. Lower the learning rate, look for extreme "
                    "rewards and advantages, or compute in float32 (fsdp_config.dtype); trainer.max_nonfinite_updates sets "
                    "the limit."
                )
