"""LoRA adapters that vLLM applies beside its weights: one, in memory, replaced by every update.

vLLM reads adapters from files. Here they come as tensors, like weights.
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
from verl_rc.rollout.vllm.signatures import require_parameters
from verl_rc.weight_sync.manifest import FACTORS

_ID, _FIRST, _SECOND = 1, *FACTORS
REQUEST = LoRARequest("policy", _ID, "held in memory alone")
"""Asks for the adapter. Its id stays: an update takes the cached prefixes away, or they have the version of
the weights in their salt. An engine that holds no adapter would look for this path, and fail."""
_wrapped_by_vllm = model_manager.get_supported_lora_modules
_add_of_vllm = PunicaWrapperCPU.add_lora_linear
_PARAMETERS = [
    *("self", "y", "x", "lora_a_stacked", "lora_b_stacked", "scale", "output_slices", "buffer", "kwargs")
]


def adapter_arguments(rank: int) -> dict[str, Any]:
    """Those of ``vllm.LLM``."""
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": adapter_room(rank)}


def _linear_layers(model: nn.Module) -> list[str]:
    """Of the layers that vLLM would wrap, those that the trainer can have adapters for: no embedding, no
    output layer, whose adapter would read a whole vocabulary for every token, and no experts."""
    linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, LinearBase)}
    return [name for name in _wrapped_by_vllm(model) if name in linear]


def wrap_linear_layers_alone() -> None:
    """Let vLLM make room for adapters beside linear layers alone. Raises ``RuntimeError`` when vLLM's
    function has changed."""
    require_parameters(_wrapped_by_vllm, ["model"], "names the layers that take adapters")
    model_manager.get_supported_lora_modules = _linear_layers


def _add_product(
    wrapper: PunicaWrapperCPU,
    y: Tensor,
    x: Tensor,
    lora_a_stacked: tuple[Tensor, ...],
    lora_b_stacked: tuple[Tensor, ...],
    scale: float,
    output_slices: tuple[int, ...],
    **_: Any,
) -> None:
    """Add the adapter's share to the output ``y`` of a layer: two products in float32, rounded once.

    vLLM copies both factors for every token, and gives tokens without an adapter one when others have it.
    """
    inputs = x.flatten(0, -2).float()
    has_adapter = wrapper.token_lora_indices == 0
    if not has_adapter.all():
        inputs = inputs * has_adapter[:, None]
    outputs = y.view(-1, y.shape[-1]).split(output_slices, dim=-1)
    for output, first, second in zip(outputs, lora_a_stacked, lora_b_stacked, strict=True):
        output += scale * F.linear(F.linear(inputs, first[0, 0].float()), second[0, 0].float())


def multiply_by_one_adapter() -> None:
    """Let vLLM on a CPU multiply all tokens by the one adapter that there is. Raises ``RuntimeError`` when
    vLLM's method has changed."""
    require_parameters(_add_of_vllm, _PARAMETERS, "adds adapters on a CPU")
    PunicaWrapperCPU.add_lora_linear = _add_product


def take_out_adapter_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Take the layers with adapters out of the model, which then has the names of its weights; returns them
    by their places, for ``put_back``."""
    taken = {
        name: part
        for name, part in model.named_modules(remove_duplicate=False)
        if isinstance(part, BaseLayerWithLoRA)
    }
    put_back(model, {name: part.base_layer for name, part in taken.items()})
    return taken


def put_back(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Layers at their places in the model."""
    for name, layer in layers.items():
        place, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(place), attribute, layer)


def apply_adapter(manager: Any, tensors: Mapping[str, Tensor]) -> None:
    """Let vLLM's ``LoRAModelManager`` compute with this adapter in the place of the one before.

    A factor without the other is left out: the receipts tell what has not come. Raises ``RuntimeError`` when
    no layer takes a factor, or vLLM keeps another adapter.
    """
    manager.remove_adapter(_ID)
    layers = [name.removesuffix(_FIRST) for name in tensors if name.endswith(_FIRST)]
    whole = [layer for layer in layers if layer + _SECOND in tensors]
    if not whole:
        return
    rank = len(tensors[whole[0] + _FIRST])
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    adapter = LoRAModel.from_lora_tensors(
        _ID,
        {layer + factor: tensors[layer + factor] for layer in whole for factor in (_FIRST, _SECOND)},
        PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # the second factors are scaled already
        device=manager.device,
        dtype=manager.lora_config.lora_dtype,
        weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
    )
    is_new = manager.add_adapter(adapter) and manager.activate_adapter(_ID)
    homeless = sorted(set(adapter.loras) - set(manager.modules))
    if homeless:
        raise RuntimeError(
            f"each adapter needs a layer of vLLM that takes one, but {len(homeless)} have none, the first: "
            f"{homeless[0]}. Take these out of actor_rollout_ref.model.target_modules, or pass "
            "actor_rollout_ref.model.lora.merge=True."
        )
    if not is_new:
        raise RuntimeError("vLLM must take the adapter of an update, but it kept the one before.")
