"""vLLM's attention on a CPU as both sides call it: one query in a request, keys in one split.

With several queries in a request, or several splits, the order of the sums depends on the batch.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from verl_rc.runtime.exact import InexactError
from verl_rc.runtime.exact.operations import linear
from verl_rc.runtime.exact.vllm_functions import paged_layout, require_functions

__all__ = ["DEVICE", "attend", "linear", "log_softmax", "normalise", "require_vllm"]

DEVICE = "cpu"
log_softmax = partial(torch.log_softmax, dim=-1)
"""The function of vLLM's sampler."""
normalise = None
"""None: the trainer keeps its norms, and the engine's are replaced."""
_BLOCK = 128
"""Tokens in a block of the trainer's KV cache."""
_LAYERS, _ATTENTION = "vllm.model_executor.layers", "vllm.v1.attention"
_NEEDED_FUNCTIONS: Mapping[str, str] = {
    "vllm._custom_ops:cpu_attention_with_kv_cache": "query key_cache value_cache output query_start_loc "
    "seq_lens scale causal alibi_slopes sliding_window block_table softcap scheduler_metadata s_aux",
    "vllm._custom_ops:cpu_attn_reshape_and_cache": "key value key_cache value_cache slot_mapping isa",
    "vllm._custom_ops:cpu_attn_get_scheduler_metadata": "num_reqs num_heads num_kv_heads head_dim seq_lens "
    "dtype query_start_loc causal sliding_window_size isa enable_kv_split",
    f"{_ATTENTION}.backends.cpu_attn:_get_attn_isa": "dtype block_size head_size kv_cache_dtype",
    f"{_ATTENTION}.backends.cpu_attn:CPUAttentionMetadataBuilder.build": "common_prefix_len "
    "common_attn_metadata fast_build",
    f"{_ATTENTION}.backends.cpu_attn:CPUAttentionBackend.get_builder_cls": "",
    f"{_ATTENTION}.backend:CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens num_reqs "
    "num_actual_tokens max_query_len block_table_tensor",
    f"{_ATTENTION}.backends.registry:register_backend": "backend class_path",
    f"{_LAYERS}.utils:dispatch_cpu_unquantized_gemm": "layer remove_weight",
    f"{_LAYERS}.activation:SiluAndMul.forward_native": "x",
    f"{_LAYERS}.activation:GeluAndMul.forward_native": "x",
    f"{_LAYERS}.layernorm:RMSNorm.forward_native": "x residual",
    f"{_LAYERS}.layernorm:GemmaRMSNorm.forward_native": "x residual",
}
"""Functions of vLLM that exact mode calls or replaces, and the arguments that they must take."""


@cache
def require_vllm() -> None:
    """Load vLLM's CPU kernels. Raises ``InexactError`` naming the first function that is not as expected."""
    require_functions(_NEEDED_FUNCTIONS)
    if not current_platform.is_cpu():
        raise InexactError(
            f"exact mode on a CPU needs vLLM's CPU build, got that for {current_platform.device_type}; run "
            "bash scripts/install.sh cpu."
        )
    current_platform.import_kernels()
    # vLLM's attention uses AMX, which Linux allows a process that has asked. oneDNN would ask, but
    # EXACT_ENVIRONMENT keeps it from AMX.
    torch.cpu._init_amx()


@torch.no_grad()
def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Causal attention ``[N, heads, head_dim]`` within packed sequences of ``lengths`` (int64, sum N).

    ``key`` and ``value`` may have fewer heads than ``query``.
    """
    (count, heads, head_dim), kv_heads = query.shape, key.shape[1]
    isa = _get_attn_isa(query.dtype, _BLOCK, head_dim, "auto")
    num_blocks, sequences, positions, slots, block_table = paged_layout(lengths, _BLOCK)
    context_lengths, starts = (positions + 1).int(), torch.arange(count + 1, dtype=torch.int32)
    # Zeros: the kernel multiplies empty slots by 0, and 0 * NaN is NaN.
    cache = query.new_zeros(num_blocks, kv_heads, 2 * _BLOCK, head_dim)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
    scheduler_metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=count,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=context_lengths,
        dtype=query.dtype,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=False,
    )
    output = torch.empty_like(query)
    ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=keys,
        value_cache=values,
        output=output,
        query_start_loc=starts,
        seq_lens=context_lengths,
        scale=scaling,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=block_table[sequences].contiguous(),
        softcap=0.0,
        scheduler_metadata=scheduler_metadata,
        s_aux=None,
    )
    return output
