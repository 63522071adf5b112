"""FSDP2: sharded fp32 master weights, a compute dtype, and gathering whole tensors."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard_model(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool = True
) -> FSDPModule:
    """Shard ``model`` over the data-parallel mesh, one unit per transformer layer, reducing gradients in fp32."""
    # Gradients are summed in float32: a sum over ranks in bfloat16 loses small contributions.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # Layers first: the last call takes the parameters that no layer has taken (embeddings, norm, head).
    for layer in transformer_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    assert isinstance(model, FSDPModule)
    return model


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated decoder layers of a Hugging Face model: the modules named in its ``_no_split_modules``."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            f"sharding needs a model class that names its decoder layers in _no_split_modules, got {type(model).__name__}."
        )
    return layers


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor behind a shard; a collective when it is sharded, the tensor itself otherwise."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
