"""The engine's side on a GPU: replacements of vLLM's operations, installed before it builds a model.

No GPU has run this. Linear layers, attention and log-softmax are those of vLLM's batch-invariant mode.
"""

from collections.abc import Callable, Mapping
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

from verl_rc.runtime.exact import ENGINE_ARGUMENTS, fix_summation_order
from verl_rc.runtime.exact.gpu_kernels import DEVICE, normalise, require_vllm

_ROTARY_EMBEDDINGS = (
    RotaryEmbeddingBase,
    Llama3RotaryEmbedding,
    Phi3LongRoPEScaledRotaryEmbedding,
    YaRNScalingRotaryEmbedding,
)


class _GpuRmsNorm(RMSNorm):
    """Rounds the sum of residual and update to the model's dtype before the norm, as transformers does."""

    def forward_cuda(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of ``x``; with ``residual``, the norm of their sum, and the sum."""
        total = x if residual is None else residual + x
        normalised = normalise(total, self.weight, self.variance_epsilon)
        return normalised if residual is None else (normalised, total)


def _computed_on_cpu(frequencies: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``frequencies`` computed on the CPU, as transformers does: a GPU rounds powers otherwise."""

    def frequencies_from_cpu(self: RotaryEmbeddingBase, base: Any) -> Tensor:
        device = torch.get_default_device()
        with torch.device("cpu"):
            return frequencies(self, base).to(device)

    return frequencies_from_cpu


_get_logits = LogitsProcessor._get_logits


def _get_contiguous_logits(self: LogitsProcessor, *inputs: Any, **options: Any) -> Tensor | None:
    """vLLM's logits in contiguous memory: rows as far apart as those of a padded vocabulary could make a
    compiled log-softmax add in another order."""
    logits = _get_logits(self, *inputs, **options)
    return None if logits is None else logits.contiguous()


@cache
def use_trainer_operations() -> Mapping[str, Any]:
    """Let every model that vLLM builds in this process from now on compute with the trainer's operations.

    Returns the keyword arguments of ``vllm.LLM`` that this needs. Raises ``InexactError`` unless vLLM has
    the functions that exact mode calls or replaces.
    """
    fix_summation_order(DEVICE)
    require_vllm()
    RMSNorm.register_oot(_GpuRmsNorm)
    LogitsProcessor._get_logits = _get_contiguous_logits
    for rotary in _ROTARY_EMBEDDINGS:
        rotary._compute_inv_freq = _computed_on_cpu(rotary._compute_inv_freq)
    return ENGINE_ARGUMENTS[DEVICE]
