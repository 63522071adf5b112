"""EXACT MODE: the operations with which an engine and the trainer compute the same bits.

Both sides multiply and attend by the functions of ``cpu_kernels``, or on a GPU by those of ``gpu_kernels``;
``trainer`` and ``cpu_engine`` or ``gpu_engine`` put them in the places of what each side has.
"""

import os
from collections.abc import Mapping
from typing import Any

_BY_PYTORCH = ("-rotary_embedding",)
"""Operations that vLLM leaves to PyTorch's own, as transformers has them."""

ENGINE_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"compilation_config": {"custom_ops": ["all", *_BY_PYTORCH]}},
    "cuda": {
        "compilation_config": {"custom_ops": ["all", *_BY_PYTORCH, "-silu_and_mul", "-gelu_and_mul"]},
        "enforce_eager": True,  # a compiler would fuse operations, which then round elsewhere
        "attention_backend": "TRITON_ATTN",
    },
}
"""Keyword arguments of ``vllm.LLM`` by the device it computes on."""

LIBRARIES: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # with AMX, rows choose how a sum is split
        "MKL_CBWR": "AUTO,STRICT",  # else rows, and their place in memory, do so in float32
    },
    "cuda": {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # version 2 computes another log-softmax
        "TRITON_F32_DEFAULT": "ieee",  # else products in float32 round to 10 bits first
    },
}
"""Environment variables of both sides, by device: with them, the number of rows does not change the order of
sums."""


def hold_sums(device: str) -> None:
    """Set the ``LIBRARIES`` of ``device`` for this process and those it starts; what the user has set stays.

    oneDNN reads its own when it first multiplies; MKL and vLLM before, when modules are imported: early
    enough for processes that are started later.
    """
    for name, value in LIBRARIES[device].items():
        os.environ.setdefault(name, value)


class InexactError(RuntimeError):
    """Engine and trainer do not compute the same bits, or cannot be known to."""
