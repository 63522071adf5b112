"""Stopping a run whose gradients are NaN or infinite."""

import math
from collections.abc import Iterable


class NonFiniteGradientsError(RuntimeError):
    """Too many gradients in a row were not finite."""


def count_nonfinite_updates(in_a_row: int, role: str, grad_norms: Iterable[float], limit: int) -> int:
    """Optimizer steps in a row of ``role`` that were left out because their gradient was NaN or infinite.

    ``in_a_row`` were left out up to now; ``grad_norms`` are those of the following steps, in their order. Raises
    ``NonFiniteGradientsError`` at ``limit`` (``trainer.max_nonfinite_updates``).
    """
    for norm in grad_norms:
        in_a_row = 0 if math.isfinite(norm) else in_a_row + 1
        if in_a_row >= limit:
            raise NonFiniteGradientsError(
                f"the {role}'s gradients must be finite, but those of {limit} optimizer steps in a row were NaN or "
                "infinite. They were left out, so the weights are as before. Lower the learning rate, look for extreme "
                "rewards and advantages, or compute in float32 (fsdp_config.dtype); trainer.max_nonfinite_updates sets "
                "the limit."
            )
    return in_a_row
