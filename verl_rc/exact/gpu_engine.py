"""The engine's side on a GPU: what replaces vLLM's own operations, put there before it builds a model.

No GPU has run this. vLLM's batch-invariant mode gives linear layers, attention and log-softmax.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import (
    Llama3RotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from verl_rc.exact import hold_sums
from verl_rc.exact.gpu_kernels import DEVICE, normalise, require_vllm

_ROTARY = (
    RotaryEmbeddingBase,
    Llama3RotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


class _RoundedRmsNorm(RMSNorm):
    """As transformers: the sum of residual and update is rounded to the model's dtype before it is
    normalised."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise ``x``, or its sum with ``residual``, which is returned too."""
        total = x if residual is None else residual + x
        normalised = normalise(total, self.weight, self.variance_epsilon)
        return normalised if residual is None else (normalised, total)


def _on_the_cpu(frequencies: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """As transformers computes them: powers and quotients are rounded in another way on a GPU."""

    def computed_there(self: RotaryEmbeddingBase, base: Any) -> Tensor:
        device = torch.get_default_device()
        with torch.device("cpu"):
            return frequencies(self, base).to(device)

    return computed_there


_cut_logits = LogitsProcessor._get_logits


def _whole_logits(self: LogitsProcessor, *inputs: Any, **options: Any) -> Tensor | None:
    """In the place of vLLM's, whose rows are as far apart as those of its padded vocabulary: a compiled
    log-softmax could then add in another order."""
    logits = _cut_logits(self, *inputs, **options)
    return None if logits is None else logits.contiguous()


@cache
def compute_alike() -> None:
    """Give every model that vLLM builds in this process from now on the operations of the trainer.

    Raises ``InexactError`` where vLLM is another than the one that was looked at.
    """
    hold_sums(DEVICE)
    require_vllm()
    RMSNorm.register_oot(_RoundedRmsNorm)
    LogitsProcessor._get_logits = _whole_logits
    for kind in _ROTARY:
        kind._compute_inv_freq = _on_the_cpu(kind._compute_inv_freq)
