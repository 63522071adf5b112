"""Precisions by the names they have in configurations."""

import torch

_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a precision: ``fp32``, ``bf16``, ``fp16``, or torch's own name."""
    dtype: torch.dtype = getattr(torch, _SHORT_NAMES.get(name, name))
    return dtype
