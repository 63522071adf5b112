"""The engine's side on a GPU: what replaces vLLM's own operations, put there before it builds a model.

No GPU has run this. vLLM's batch-invariant mode gives linear layers, attention and log-softmax.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from verl_rc.exact import hold_sums
from verl_rc.exact.gpu_kernels import DEVICE, normalise, require_vllm


class _RoundedRmsNorm(RMSNorm):
    """As transformers: the sum of residual and update is rounded to the model's dtype before it is
    normalised."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise ``x``, or its sum with ``residual``, which is returned too."""
        total = x if residual is None else residual + x
        normalised = normalise(total, self.weight, self.variance_epsilon)
        return normalised if residual is None else (normalised, total)


_frequencies_on_the_device = RotaryEmbeddingBase._compute_inv_freq


def _frequencies_of_transformers(self: RotaryEmbeddingBase, base: float) -> Tensor:
    """In the place of vLLM's: transformers computes powers of ``base`` on the CPU, which rounds otherwise."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        return _frequencies_on_the_device(self, base).to(device)


@cache
def compute_alike() -> None:
    """Give every model that vLLM builds in this process from now on the operations of the trainer.

    Raises ``InexactError`` where vLLM is another than the one that was looked at.
    """
    hold_sums(DEVICE)
    require_vllm()
    RMSNorm.register_oot(_RoundedRmsNorm)
    RotaryEmbeddingBase._compute_inv_freq = _frequencies_of_transformers
