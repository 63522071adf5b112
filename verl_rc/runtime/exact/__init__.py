"""EXACT MODE: the operations with which an engine and the trainer compute the same bits.

Both sides compute linear layers and attention with the functions of ``cpu_kernels``, or on a GPU with those
of ``gpu_kernels``. ``trainer`` installs them in the trainer's model, ``cpu_engine`` or ``gpu_engine`` in
vLLM.
"""

import os
from collections.abc import Mapping
from typing import Any

_PYTORCH_OPERATIONS = ("-rotary_embedding",)
"""Operations that vLLM must compute with PyTorch's functions, as transformers does."""

ENGINE_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"compilation_config": {"custom_ops": ["all", *_PYTORCH_OPERATIONS]}},
    "cuda": {
        "compilation_config": {"custom_ops": ["all", *_PYTORCH_OPERATIONS, "-silu_and_mul", "-gelu_and_mul"]},
        "enforce_eager": True,  # fused operations round elsewhere
        "attention_backend": "TRITON_ATTN",
    },
}
"""Keyword arguments of ``vllm.LLM`` by the device it computes on."""

EXACT_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    "cpu": {
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # with AMX, the number of rows decides how sums are split
        "MKL_CBWR": "AUTO,STRICT",  # else the rows and their addresses decide it in float32
    },
    "cuda": {
        "VLLM_BATCH_INVARIANT": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # version 2 computes another log-softmax
        "TRITON_F32_DEFAULT": "ieee",  # else the factors of float32 products are rounded to 10 bits
    },
}
"""Environment variables of both sides, by device. With them the order of a sum does not depend on the number
of rows."""


def what_it_means(device: str) -> str:
    """A sentence about a run in exact mode on ``device``."""
    untried = "" if device == "cpu" else "; on a GPU it was never run: try verl-rc exact MODEL there first"
    return (
        "engine, actor and reference compute the same bits; a step in which a token of the actor's own "
        f"weights differs ends the run, and what is left of the gap is staleness alone{untried}"
    )


def fix_summation_order(device: str) -> None:
    """Set the ``EXACT_ENVIRONMENT`` of ``device`` for this process and its children; the user's values stay.

    Only children are sure to obey: oneDNN reads its variable at the first product, but MKL and vLLM read
    theirs when they are imported.
    """
    for name, value in EXACT_ENVIRONMENT[device].items():
        os.environ.setdefault(name, value)


def summation_order() -> dict[str, str]:
    """Variables of ``EXACT_ENVIRONMENT`` that this process has, for processes on other nodes."""
    names = [name for variables in EXACT_ENVIRONMENT.values() for name in variables]
    return {name: os.environ[name] for name in names if name in os.environ}


class InexactError(RuntimeError):
    """Engine and trainer do not compute the same bits, or nothing shows that they do."""
