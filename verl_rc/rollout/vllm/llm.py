"""vLLM's ``LLM``, from the options of an engine."""

from importlib import import_module
from typing import Any

import torch
from vllm import LLM

from verl_rc.rollout.vllm.options import VllmOptions


def build_llm(options: VllmOptions, **further: Any) -> LLM:
    """Build it with ``further`` keyword arguments.

    Raises ``InexactError`` where exact mode does not fit this vLLM.
    """
    if options.exact:
        device = "gpu" if torch.cuda.is_available() else "cpu"
        import_module(f"verl_rc.exact.{device}_engine").compute_alike()
    return LLM(
        model=options.model_path,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        disable_log_stats=True,
        **further,
        **options.arguments,
    )
