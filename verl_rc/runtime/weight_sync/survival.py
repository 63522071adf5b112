"""The share of a weight update that survives the engine's rounding.

Master weights W are in float32, the engine computes with the rounded weights Q(W). The update D of a weight
is lost when Q(W + D) = Q(W), and exaggerated when Q(W + D) is the next number of the engine's precision.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_FP8, _FP8_MAX = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max
Weights = Iterable[tuple[str, Tensor]]
"""Names, and this rank's rows in float32."""


@dataclass(frozen=True)
class EngineRounding:
    """The rounding of weights when an engine loads them."""

    dtype: torch.dtype
    quantization: str | None
    """The engine's quantization: None or ``fp8_per_channel``."""
    quantised_names: frozenset[str]
    """The quantised weights: those of linear layers, without the output layer."""

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        """Rows of a weight after rounding, float32.

        ``fp8_per_channel`` scales each row of a linear layer so that its largest magnitude becomes that of
        e4m3 (vLLM 0.32, ``online/fp8.py``).
        """
        rounded = weight.to(self.dtype)
        if self.quantization is None or name not in self.quantised_names:
            return rounded.float()
        row_maximum = rounded.float().abs().amax(dim=-1, keepdim=True)
        scale = (row_maximum / _FP8_MAX).clamp_min(1 / (_FP8_MAX * 512))
        return (rounded / scale).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8).float() * scale


class UpdateSurvival:
    """Compares the weights before and after an update."""

    def __init__(self, weights: Weights) -> None:
        """Copy the weights before the update into host memory."""
        self._old_weights = {
            name: torch.empty(rows.shape, dtype=torch.float32).copy_(rows) for name, rows in weights
        }

    def sums(self, weights: Weights, rounding: EngineRounding) -> Tensor:
        """Sums over this rank's rows of ``weights`` after the update, float64 ``[4]``: ⟨Q(W + D) - Q(W), D⟩,
        |D|², number of weights that changed in the engine, number of weights that changed.

        The quotient of the first two, each summed over ranks, is the surviving share: 1 when nothing is lost.
        """
        total = torch.zeros(4, dtype=torch.float64)
        for name, rows in weights:
            old_rows, new_rows = self._old_weights[name], rows.cpu()
            update = (new_rows - old_rows).double()
            survivor = rounding(name, new_rows).double() - rounding(name, old_rows)
            total += torch.stack(
                [
                    (survivor * update).sum(),
                    update.square().sum(),
                    (survivor != 0).sum(),
                    (update != 0).sum(),
                ]
            ).double()
        return total
