"""Inputs of recomputed layers in host memory between forward and backward pass."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.autograd.graph import save_on_cpu


def offload_layer_inputs(model: nn.Module, device_type: str) -> None:
    """Keep what ``model`` saves of each recomputed layer, its input, in pinned host memory. A model on a CPU
    stays as it is.

    The hooks are on while a layer is called, not around the whole model, whose last layer would send the
    weights of the vocabulary to the host with every micro-batch.
    """
    if device_type == "cpu":
        return
    for layer in model.modules():
        recompute: Callable[..., Any] | None = vars(layer).get("_gradient_checkpointing_func")
        if recompute is not None:
            layer.__dict__["_gradient_checkpointing_func"] = _saving_on_the_host(recompute)


def _saving_on_the_host(recompute: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        with save_on_cpu(pin_memory=True):
            return recompute(*arguments)

    return call
