"""The engine's side on a CPU: what replaces vLLM's own operations, put there before it builds a model."""

import os
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

from verl_rc.exact import hold_sums
from verl_rc.exact.cpu_kernels import DEVICE, require_vllm
from verl_rc.exact.operations import linear, whole_vectors


class _OneByOneBuilder(CPUAttentionMetadataBuilder):
    """Makes every token of a prefill a request of its own, as if it were decoded."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata:
        """What vLLM's attention is told of a batch."""
        common = common_attn_metadata
        if common.max_query_len > 1:
            starts, count = common.query_start_loc[: common.num_reqs + 1], common.num_actual_tokens
            rows = torch.repeat_interleave(starts.diff().long())
            ones = torch.arange(count + 1, dtype=starts.dtype)
            later = starts[1:][rows] - 1 - ones[:-1]
            common = replace(
                common,
                num_reqs=count,
                max_query_len=1,
                query_start_loc=ones,
                query_start_loc_cpu=ones,
                seq_lens=(common.seq_lens[rows] - later).to(common.seq_lens.dtype),
                block_table_tensor=common.block_table_tensor[rows].contiguous(),
            )
        return super().build(common_prefix_len, common, fast_build)


class OneByOneBackend(CPUAttentionBackend):
    """vLLM's attention on a CPU with that builder; vLLM imports it by its name."""

    @staticmethod
    def get_builder_cls() -> type[_OneByOneBuilder]:
        """The builder."""
        return _OneByOneBuilder


class _RoundsFirst:
    """As transformers: the sum of residual and update is rounded to the model's dtype before it is
    normalised."""

    forward_native: Any

    def forward_cpu(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Normalise ``x``, or its sum with ``residual``, which is returned too."""
        if residual is None:
            return self.forward_native(x)
        total = residual + x
        return self.forward_native(total), total


class _RoundedRmsNorm(_RoundsFirst, RMSNorm):
    """Of most models."""


class _RoundedGemmaRmsNorm(_RoundsFirst, GemmaRMSNorm):
    """Of Gemma's models, which multiplies by 1 + weight."""


class _OfWholeVectors:
    """Activation and product of the two halves of ``x``."""

    forward_native: Any

    def forward_cpu(self, x: Tensor) -> Any:
        """With zeros behind both halves."""
        halves = torch.cat([whole_vectors(half) for half in x.chunk(2, -1)], -1)
        return self.forward_native(halves)[..., : x.shape[-1] // 2]


class _VectorSiluAndMul(_OfWholeVectors, SiluAndMul):
    """With SiLU."""


class _VectorGeluAndMul(_OfWholeVectors, GeluAndMul):
    """With GELU."""


def _multiply_alike(layer: Any, remove_weight: bool) -> None:
    """In the place of vLLM's choice of a product for a linear layer."""
    del remove_weight
    layer.cpu_linear = linear


@cache
def compute_alike() -> None:
    """Give every model that vLLM builds in this process from now on the operations of the trainer.

    Raises ``InexactError`` where vLLM is another than the one that was looked at.
    """
    require_vllm()
    hold_sums(DEVICE)
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{OneByOneBackend.__name__}")
    RMSNorm.register_oot(_RoundedRmsNorm)
    GemmaRMSNorm.register_oot(_RoundedGemmaRmsNorm)
    SiluAndMul.register_oot(_VectorSiluAndMul)
    GeluAndMul.register_oot(_VectorGeluAndMul)
    utils.dispatch_cpu_unquantized_gemm = _multiply_alike  # imported where it is called
