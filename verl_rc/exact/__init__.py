"""EXACT MODE: the operations with which an engine and the trainer compute the same bits, on a CPU.

Both sides multiply by ``operations.linear`` and attend by ``kernels.attend_one_by_one``; ``trainer`` and
``engine`` put them in the places of what each has.
"""

ENGINE_ARGUMENTS = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""Keyword arguments of ``vllm.LLM``: rotary embedding by PyTorch's own operations, as transformers has it."""


class InexactError(RuntimeError):
    """Engine and trainer do not compute the same bits, or cannot be known to."""
