"""vLLM's output layer in float32 on a CPU, with weights that are cast once an update.

vLLM casts them in every step: half of the layer's time with a vocabulary of 151,936 tokens and a width of
896.
"""

from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_float32_weights: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""Weights of output layers in float32."""
_vllm_apply_head = LogitsProcessor._apply_head


def _apply_head(
    processor: LogitsProcessor, lm_head: nn.Module, hidden_states: Tensor, embedding_bias: Tensor | None
) -> Tensor:
    """Logits as vLLM's method computes them, from stored weights where it would cast them."""
    if (
        processor.head_dtype != torch.float32
        or hidden_states.dtype == torch.float32
        or hidden_states.device.type != "cpu"
        or not isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
    ):
        logits: Tensor = _vllm_apply_head(processor, lm_head, hidden_states, embedding_bias)
        return logits
    if lm_head not in _float32_weights:
        _float32_weights[lm_head] = cast(Tensor, lm_head.weight).detach().float()
    bias = None if embedding_bias is None else embedding_bias.float()
    return F.linear(hidden_states.float(), _float32_weights[lm_head], bias)


def use_float32_heads() -> None:
    """Let vLLM store the float32 weights of output layers that it computes in float32."""
    LogitsProcessor._apply_head = _apply_head


def forget_float32_heads() -> None:
    """Drop the stored weights before an update."""
    _float32_weights.clear()
