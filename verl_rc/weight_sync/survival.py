"""What an engine's rounding leaves of an update of the weights.

Master weights W are in float32, the engine computes with Q(W). In a weight an update D is lost where it does
not reach the engine's next number, and exaggerated where it does.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_FP8, _LARGEST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max
Weights = Iterable[tuple[str, Tensor]]
"""Names, and this rank's rows in float32."""


@dataclass(frozen=True)
class EngineRounding:
    """How an engine rounds a weight when it loads it."""

    dtype: torch.dtype
    quantization: str | None
    """None or ``fp8_per_channel``."""
    quantised_names: frozenset[str]
    """Weights that it takes: linear layers without the output layer."""

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Rows of a weight, float32, as the engine has them.

        ``fp8_per_channel`` scales each row of a linear layer, its largest number to the largest of e4m3 (vLLM
        0.32, ``online/fp8.py``).
        """
        rounded = weight.to(self.dtype)
        if self.quantization is None or name not in self.quantised_names:
            return rounded.float()
        largest = rounded.float().abs().amax(dim=-1, keepdim=True)
        scale = (largest / _LARGEST).clamp_min(1 / (_LARGEST * 512))
        return (rounded / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scale


class UpdateSurvival:
    """Compares weights before an update with those after it."""

    def __init__(self, weights: Weights) -> None:
        """Copy the weights that are about to change into host memory."""
        self._before = {
            name: torch.empty(rows.shape, dtype=torch.float32).copy_(rows) for name, rows in weights
        }

    def sums(self, weights: Weights, rounding: EngineRounding) -> Tensor:
        """float64 ``[4]``: ⟨Q(W + D) - Q(W), D⟩, |D|², weights that are other numbers in the engine, weights
        that changed; over this rank's rows of the same ``weights`` after the update.

        The first two, each added over ranks, make the share that survives: 1 when nothing is lost.
        """
        total = torch.zeros(4, dtype=torch.float64)
        for name, rows in weights:
            before, after = self._before[name], rows.cpu()
            update = (after - before).double()
            moved = rounding(name, after).double() - rounding(name, before)
            total += torch.stack(
                [(moved * update).sum(), update.square().sum(), (moved != 0).sum(), (update != 0).sum()]
            ).double()
        return total
