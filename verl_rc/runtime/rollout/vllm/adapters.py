"""The LoRA adapter that vLLM applies beside its weights: one, in memory, replaced by every update.

vLLM reads adapters from files. Here their tensors come with updates, like weights.
"""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from vllm.lora import model_manager
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import LinearBase

from verl_rc.config.models import adapter_room
from verl_rc.runtime.rollout.vllm.signatures import require_parameters
from verl_rc.runtime.weight_sync.manifest import FACTORS

_ID, _LORA_A, _LORA_B = 1, *FACTORS
REQUEST = LoRARequest("policy", _ID, "held in memory alone")
"""Requests the adapter. Its id stays the same: an update drops cached prefixes, or their salt has the version
of the weights. An engine without the adapter would look for this path, and fail."""
_wrapped_by_vllm = model_manager.get_supported_lora_modules
_add_of_vllm = PunicaWrapperCPU.add_lora_linear
_ADD_PARAMETERS = [
    *("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs")
]


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an adapter."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter_room(rank)}


def _supported_linear_layers(model: nn.Module) -> list[str]:
    """The layers for which vLLM supports adapters and the trainer can have one: no embedding, no output
    layer, whose adapter would have a row for every token of the vocabulary, and no experts."""
    linear = {
        name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, LinearBase)
    }
    return [name for name in _wrapped_by_vllm(model) if name in linear]


def limit_adapters_to_linear_layers() -> None:
    """Let vLLM support adapters of linear layers only. Raises ``RuntimeError`` when vLLM's function has
    changed."""
    require_parameters(_wrapped_by_vllm, ["model"], "names the layers that take adapters")
    model_manager.get_supported_lora_modules = _supported_linear_layers


def _add_adapter_product(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add the adapter's product to the output ``y`` of a layer: computed in float32, rounded once.

    vLLM's method copies both factors for every token, and applies the adapter to tokens without one when
    other tokens of the batch have it.
    """
    inputs = x.flatten(0, -2).float()
    has_adapter = wrapper.token_lora_indices == 0
    if not has_adapter.all():
        inputs = inputs * has_adapter[:, None]
    outputs = y.view(-1, y.shape[-1]).split(output_slices, dim=-1)
    for output, factor_a, factor_b in zip(outputs, lora_a_stacked, lora_b_stacked, strict=True):
        output += scale * F.linear(F.linear(inputs, factor_a[0, 0].float()), factor_b[0, 0].float())


def use_single_adapter_product() -> None:
    """Let vLLM on a CPU multiply all tokens by the single adapter. Raises ``RuntimeError`` when vLLM's method
    has changed."""
    require_parameters(_add_of_vllm, _ADD_PARAMETERS, "adds adapters on a CPU")
    PunicaWrapperCPU.add_lora_linear = _add_adapter_product


def detach_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Replace layers with adapters by their base layers, which have the names of the weights; returns the
    replaced layers by name, for ``attach_layers``."""
    adapter_layers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, BaseLayerWithLoRA)
    }
    attach_layers(model, {name: module.base_layer for name, module in adapter_layers.items()})
    return adapter_layers


def attach_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Set the layers of a model by name."""
    for name, layer in layers.items():
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, layer)


def apply_adapter(manager: Any, tensors: Mapping[str, Tensor]) -> None:
    """Let vLLM's ``LoRAModelManager`` compute with this adapter instead of the last one.

    A single factor of a layer is ignored: receipts report the missing one. Raises ``RuntimeError`` when a
    layer does not support adapters, or vLLM keeps the last adapter.
    """
    manager.remove_adapter(_ID)
    layers = [name.removesuffix(_LORA_A) for name in tensors if name.endswith(_LORA_A)]
    complete_layers = [layer for layer in layers if layer + _LORA_B in tensors]
    if not complete_layers:
        return
    rank = len(tensors[complete_layers[0] + _LORA_A])
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _ID,
        {
            layer + factor: tensors[layer + factor]
            for layer in complete_layers
            for factor in (_LORA_A, _LORA_B)
        },
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the B factors are scaled already
        device=manager.device,
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    is_new = manager.add_adapter(adapter) and manager.activate_adapter(_ID)
    unmatched_layers = sorted(set(adapter.loras) - set(manager.modules))
    if unmatched_layers:
        raise RuntimeError(
            f"each adapter needs a layer of vLLM that takes one, but {len(unmatched_layers)} have none, the "
            f"first: {unmatched_layers[0]}. Take these out of actor_rollout_ref.model.target_modules, or "
            "pass actor_rollout_ref.model.lora.merge=True."
        )
    if not is_new:
        raise RuntimeError("vLLM must take the adapter of an update, but it still has the one before.")
