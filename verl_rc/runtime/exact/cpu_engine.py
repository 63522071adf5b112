"""The engine's side on a CPU: replacements of vLLM's operations, installed before it builds a model."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from verl_rc.runtime.exact import ENGINE_ARGUMENTS, fix_summation_order
from verl_rc.runtime.exact.cpu_kernels import DEVICE, require_vllm
from verl_rc.runtime.exact.operations import linear, pad_to_vectors


class _SingleQueryBuilder(CPUAttentionMetadataBuilder):
    """Makes every token of a prefill a request with one query, as in decoding."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """The metadata of a batch for vLLM's attention."""
        common = common_attn_metadata
        if common.max_query_len > 1:
            starts, num_tokens = common.query_start_loc[: common.num_reqs + 1], common.num_actual_tokens
            requests = torch.repeat_interleave(starts.diff().long())
            token_starts = torch.arange(num_tokens + 1, dtype=starts.dtype)
            tokens_after = starts[1:][requests] - 1 - token_starts[:-1]
            common = replace(
                common,
                num_reqs=num_tokens,
                max_query_len=1,
                query_start_loc=token_starts,
                query_start_loc_cpu=token_starts,
                seq_lens=(common.seq_lens[requests] - tokens_after).to(common.seq_lens.dtype),
                block_table_tensor=common.block_table_tensor[requests].contiguous(),
            )
        return super().build(common_prefix_len, common, fast_build)


class SingleQueryBackend(CPUAttentionBackend):
    """vLLM's attention on a CPU with ``_SingleQueryBuilder``; vLLM imports it by its name."""

    @staticmethod
    def get_builder_cls() -> type[_SingleQueryBuilder]:
        """The builder."""
        return _SingleQueryBuilder


class _RoundsResidualSum:
    """Rounds the sum of residual and update to the model's dtype before the norm, as transformers does."""

    forward_native: Any

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """The norm of ``x``; with ``residual``, the norm of their sum, and the sum."""
        if residual is None:
            return self.forward_native(x)
        total = residual + x
        return self.forward_native(total), total


class _RoundedRmsNorm(_RoundsResidualSum, RMSNorm):
    """The norm of most models."""


class _RoundedGemmaRmsNorm(_RoundsResidualSum, GemmaRMSNorm):
    """The norm of Gemma, which multiplies by 1 + weight."""


class _PadsToVectors:
    """Multiplies the activation of the first half of ``x`` by the second half."""

    forward_native: Any

    def forward_cpu(self, x: Tensor) -> Any:
        """Pad both halves with zeros, and cut the product."""
        halves = torch.cat([pad_to_vectors(half) for half in x.chunk(2, -1)], -1)
        return self.forward_native(halves)[..., : x.shape[-1] // 2]


class _VectorSiluAndMul(_PadsToVectors, SiluAndMul):
    """SiLU."""


class _VectorGeluAndMul(_PadsToVectors, GeluAndMul):
    """GELU."""


def _use_trainer_linear(layer: Any, remove_weight: bool) -> None:
    """Replaces vLLM's choice of a kernel for a linear layer."""
    del remove_weight
    layer.cpu_linear = linear


@cache
def use_trainer_operations() -> Mapping[str, Any]:
    """Let every model that vLLM builds in this process from now on compute with the trainer's operations.

    Returns the keyword arguments of ``vllm.LLM`` that this needs. Raises ``InexactError`` unless vLLM has
    the functions that exact mode calls or replaces.
    """
    require_vllm()
    fix_summation_order(DEVICE)
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{SingleQueryBackend.__name__}")
    RMSNorm.register_oot(_RoundedRmsNorm)
    GemmaRMSNorm.register_oot(_RoundedGemmaRmsNorm)
    SiluAndMul.register_oot(_VectorSiluAndMul)
    GeluAndMul.register_oot(_VectorGeluAndMul)
    utils.dispatch_cpu_unquantized_gemm = _use_trainer_linear  # imported where it is called
    return ENGINE_ARGUMENTS[DEVICE]
