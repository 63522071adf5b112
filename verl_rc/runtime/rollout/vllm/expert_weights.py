"""Weights of experts on a CPU, packed after every update.

vLLM 0.32 packs them for its kernel only after the first load. An update overwrites them with plain weights,
which the kernel reads as packed ones: log-probs are off by nats, although every digest is equal.
"""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from verl_rc.runtime.rollout.vllm.signatures import require_parameters

_setup_of_vllm = UnquantizedFusedMoEMethod._setup_kernel
_PARAMETERS = ["self", "layer", "w13", "w2"]


def _setup_kernel(method: UnquantizedFusedMoEMethod, layer: Any, w13: torch.Tensor, w2: torch.Tensor) -> None:
    """Call vLLM's method, and after an update pack the weights as vLLM does after the first load."""
    is_update = method.moe_kernel is not None
    _setup_of_vllm(method, layer, w13, w2)
    if is_update:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


def pack_experts_after_updates() -> None:
    """Let vLLM on a CPU pack the weights of experts after every update. Raises ``RuntimeError`` when vLLM's
    method has changed."""
    require_parameters(_setup_of_vllm, _PARAMETERS, "packs weights of experts")
    UnquantizedFusedMoEMethod._setup_kernel = _setup_kernel
