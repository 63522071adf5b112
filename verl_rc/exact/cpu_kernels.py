"""vLLM's attention on a CPU as both sides call it: each query a request of its own, keys not split.

With several queries in a request, or keys in splits, the order of the sums depends on the batch.
"""

from collections.abc import Mapping
from functools import cache, partial

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from verl_rc.exact import InexactError
from verl_rc.exact.operations import linear
from verl_rc.exact.vllm_functions import pages, require_functions

__all__ = ["DEVICE", "attend", "linear", "log_softmax", "normalise", "require_vllm"]

DEVICE = "cpu"
log_softmax = partial(torch.log_softmax, dim=-1)
"""As vLLM's sampler."""
normalise = None
"""The trainer's own, as the engine's rounds first."""
_BLOCK = 128
"""Tokens of a block of the trainer's cache."""
_LAYERS, _ATTENTION = "vllm.model_executor.layers", "vllm.v1.attention"
_NEEDED: Mapping[str, str] = {
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
"""What exact mode calls or replaces in vLLM, and the arguments that it must take."""


@cache
def require_vllm() -> None:
    """Load vLLM's CPU kernels. Raises ``InexactError`` naming the first operation that is not as expected."""
    require_functions(_NEEDED)
    if not current_platform.is_cpu():
        raise InexactError(
            f"exact mode needs vLLM's CPU build, this one is for {current_platform.device_type}."
        )
    current_platform.import_kernels()
    # Linux lets a process use AMX, as vLLM's attention does, once it has asked; oneDNN, which asks else, is
    # held below AMX.
    torch.cpu._init_amx()


@torch.no_grad()
def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Causal attention ``[N, heads, head_dim]`` within packed sequences of ``lengths`` (int64, sum N).

    ``key`` and ``value`` may have fewer heads than ``query``.
    """
    (count, heads, head_dim), kv_heads = query.shape, key.shape[1]
    isa = _get_attn_isa(query.dtype, _BLOCK, head_dim, "auto")
    num_blocks, rows, positions, slots, table = pages(lengths, _BLOCK)
    ends, starts = (positions + 1).int(), torch.arange(count + 1, dtype=torch.int32)
    # Zeros: the kernel multiplies slots that nothing was written to by 0, and 0 * NaN is NaN.
    cache = query.new_zeros(num_blocks, kv_heads, 2 * _BLOCK, head_dim)
    keys, values = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=count,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        seq_lens=ends,
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
        seq_lens=ends,
        scale=scaling,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table[rows].contiguous(),
        softcap=0.0,
        scheduler_metadata=schedule,
        s_aux=None,
    )
    return output
