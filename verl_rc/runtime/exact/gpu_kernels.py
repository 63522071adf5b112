"""vLLM's batch-invariant kernels as both sides call them on a GPU.

No GPU has run this. Run ``verl-rc exact MODEL`` first: it names the operations that differ.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.model_executor.determinism import batch_invariant
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from verl_rc.runtime.exact import EXACT_ENVIRONMENT, InexactError
from verl_rc.runtime.exact.operations import with_gradient_of
from verl_rc.runtime.exact.vllm_functions import paged_layout, require_functions

DEVICE = "cuda"
_BLOCK = 32
"""Tokens in a block of the trainer's KV cache: the kernel's tile of keys."""
_LAYERS = "vllm.model_executor.layers"
_INVARIANT = "vllm.model_executor.determinism.batch_invariant"
_NEEDED_FUNCTIONS: Mapping[str, str] = {
    f"{_INVARIANT}:linear_batch_invariant": "input weight bias",
    f"{_INVARIANT}:rms_norm_batch_invariant": "input weight eps",
    f"{_INVARIANT}:log_softmax": "input dim",
    f"{_INVARIANT}:_get_matmul_config": "M N K dtype default",
    "vllm.v1.attention.ops.triton_unified_attention:unified_attention": "q k v out cu_seqlens_q max_seqlen_q "
    "seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap q_descale k_descale "
    "v_descale",
    f"{_LAYERS}.layernorm:RMSNorm.forward_cuda": "x residual",
    f"{_LAYERS}.logits_processor:LogitsProcessor._get_logits": "hidden_states",
    f"{_LAYERS}.rotary_embedding.base:RotaryEmbeddingBase._compute_inv_freq": "base",
}
"""Functions of vLLM that exact mode calls or replaces, and the arguments that they must take."""


def _default_tiling(M: int, N: int, K: int, dtype: Any, default: dict[str, int]) -> dict[str, int]:
    """Replaces vLLM's choice by N and K, which differ between the sides: vLLM computes queries, keys and
    values in one layer, the trainer in three."""
    return default


@cache
def require_vllm() -> None:
    """Make vLLM's products add in one order for layers of any width.

    Raises ``InexactError`` where a function of vLLM is missing or changed, or where vLLM is not in its
    batch-invariant mode.
    """
    require_functions(_NEEDED_FUNCTIONS)
    batch_invariant._get_matmul_config = _default_tiling
    expected = EXACT_ENVIRONMENT["cuda"]
    if wrong := {name: os.environ.get(name) for name in expected if os.environ.get(name) != expected[name]}:
        raise InexactError(
            f"exact mode on a GPU needs {expected} in the environment, got {wrong}; unset these, or drop "
            "actor_rollout_ref.exact."
        )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """vLLM's linear layer, with the gradient of ``F.linear``."""
    with torch.no_grad():
        product = batch_invariant.linear_batch_invariant(x, weight, bias)
    return with_gradient_of(lambda: F.linear(x, weight, bias), product)


def log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension, as vLLM's sampler in its batch-invariant mode."""
    log_probs: Tensor = batch_invariant.log_softmax(logits)
    return log_probs


def normalise(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """vLLM's RMSNorm of ``x``, times ``weight``."""
    normalised: Tensor = batch_invariant.rms_norm_batch_invariant(x, weight.detach(), epsilon)
    return normalised


@torch.no_grad()
def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Causal attention ``[N, heads, head_dim]`` within packed sequences of ``lengths`` (int64, sum N).

    ``key`` and ``value`` may have fewer heads than ``query``. vLLM's kernel takes the keys of a query
    in tiles of one size, in prefill and in decoding.
    """
    lengths = lengths.to(query.device)
    num_blocks, _, _, slots, block_table = paged_layout(lengths, _BLOCK)
    caches = []
    for states in (key, value):
        cache = states.new_zeros(num_blocks * _BLOCK, *states.shape[1:])
        cache[slots] = states
        caches.append(cache.unflatten(0, (num_blocks, _BLOCK)))
    output, longest = torch.empty_like(query), int(lengths.max())
    unified_attention(
        q=query,
        k=caches[0],
        v=caches[1],
        out=output,
        cu_seqlens_q=F.pad(lengths.cumsum(0), (1, 0)).int(),
        max_seqlen_q=longest,
        seqused_k=lengths.int(),
        max_seqlen_k=longest,
        softmax_scale=scaling,
        causal=True,
        window_size=(-1, -1),
        block_table=block_table,
        softcap=0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    return output
