"""EXACT MODE: the operations with which an engine and the trainer compute the same bits, on a CPU.

Both sides multiply by ``operations.linear`` and attend by ``cpu_kernels.attend``; ``trainer`` and
``engine`` put them in the places of what each has.
"""

import os

ENGINE_ARGUMENTS = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Keyword arguments of ``vllm.LLM``: rotary embedding by PyTorch's own operations, as transformers has it."""

LIBRARIES = {
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16",  # with AMX, rows choose how a sum is split
    "MKL_CBWR": "AUTO,STRICT",  # else rows, and their place in memory, do so in float32
}
"""Environment of both sides: oneDNN and MKL add in one order, whatever the number of rows."""


def hold_sums() -> None:
    """Set ``LIBRARIES`` for this process and those it starts; what the user has set stays.

    oneDNN reads it when it first multiplies; MKL before, when modules are imported: early enough for
    processes that are started later.
    """
    for name, value in LIBRARIES.items():
        os.environ.setdefault(name, value)


class InexactError(RuntimeError):
    """Engine and trainer do not compute the same bits, or cannot be known to."""
