"""vLLM's output layer in float32 on a CPU, its weights cast once for every update.

vLLM casts them in every step, half of the layer's time with 151,936 words and a width of 896.
"""

from typing import cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

_weights: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
"""The weights of output layers in float32."""
_apply_of_vllm = LogitsProcessor._apply_head


def _apply_head(
    processor: LogitsProcessor, lm_head: nn.Module, hidden_states: Tensor, embedding_bias: Tensor | None
) -> Tensor:
    """Logits, as vLLM's method computes them; from kept weights where it would cast them."""
    if (
        processor.head_dtype != torch.float32
        or hidden_states.dtype == torch.float32
        or hidden_states.device.type != "cpu"
        or not isinstance(lm_head.quant_method, (UnquantizedEmbeddingMethod, UnquantizedLinearMethod))
    ):
        logits: Tensor = _apply_of_vllm(processor, lm_head, hidden_states, embedding_bias)
        return logits
    if lm_head not in _weights:
        _weights[lm_head] = cast(Tensor, lm_head.weight).detach().float()
    bias = None if embedding_bias is None else embedding_bias.float()
    return F.linear(hidden_states.float(), _weights[lm_head], bias)


def keep_float32_heads() -> None:
    """Let vLLM's output layers keep their weights in float32, where the head is computed in it."""
    LogitsProcessor._apply_head = _apply_head


def forget_float32_heads() -> None:
    """Drop what is kept: new weights follow."""
    _weights.clear()
