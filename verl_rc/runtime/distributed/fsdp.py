"""FSDP2: sharded fp32 master weights, a compute dtype, and gathering whole tensors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor


def sharding_mesh(data_parallel: DeviceMesh, size: int) -> DeviceMesh:
    """The mesh over which weights are sharded: all ranks, or groups of ``size`` neighbouring ranks.

    With groups the mesh has the dimensions ``replicate`` and ``shard``: each group holds a copy, and
    gradients are summed over both dimensions.
    """
    ranks = data_parallel.size()
    if not 0 < size < ranks:
        return data_parallel
    return DeviceMesh(
        data_parallel.device_type, data_parallel.mesh.view(-1, size), mesh_dim_names=("replicate", "shard")
    )


def _placements(mesh: DeviceMesh) -> list[Placement]:
    """Placements of parameters: sharded along dimension 0 over the mesh's last dimension, replicated over the
    other."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


def cut_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by this rank's shard, as ``shard_model`` shards.

    On the meta device, before weights are read: transformers then reads this rank's shard of each tensor
    alone.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # No source rank: nothing is sent, each rank takes its shard of its own tensor.
            shard = distribute_tensor(parameter, mesh, _placements(mesh), src_data_rank=None)
            setattr(module, name, shards.setdefault(parameter, nn.Parameter(shard, parameter.requires_grad)))


def shard_model(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool = True
) -> FSDPModule:
    """Shard ``model`` over a ``sharding_mesh``, one unit per transformer layer, with gradients reduced in
    fp32.

    Parameters are full, or this rank's shards from ``cut_parameters``.
    """
    # Gradients are summed in float32: a sum over ranks in bfloat16 loses small contributions.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    with whole_parameters(model, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")):
        # Layers first: the last call shards the remaining parameters (embeddings, norm, head).
        for layer in transformer_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # FSDP2 reads its modules' parameters again after an _apply. The clones leave the mapped checkpoint file,
    # into which other processes may write.
    model._apply(torch.clone)
    assert isinstance(model, FSDPModule)
    if mesh.ndim > 1:
        _copy_from_first_group(model, mesh)
    return model


def _copy_from_first_group(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every group the first group's weights: adapters are drawn at random, in each group for itself."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        dist.broadcast(parameter.to_local().detach(), group=mesh.get_group("replicate"), group_src=0)


@contextmanager
def whole_parameters(model: nn.Module, empty: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the context, parameters that are shards have their full size, but no memory; ``empty`` makes
    such a tensor.

    For code that reads the sizes of parameters. ``requires_grad`` may change inside.
    """
    shards: list[tuple[nn.Module, str, nn.Parameter]] = []
    full_parameters: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                shards.append((module, name, parameter))
                # A tied parameter stays one tensor in two modules.
                full = nn.Parameter(empty(parameter), parameter.requires_grad)
                setattr(module, name, full_parameters.setdefault(parameter, full))
    try:
        yield
    finally:
        for module, name, shard in shards:
            setattr(module, name, shard.requires_grad_(getattr(module, name).requires_grad))


def without_memory(parameter: Tensor) -> Tensor:
    """A tensor of the shape of ``parameter`` whose elements share the memory of one number."""
    return torch.empty((), dtype=parameter.dtype).expand(parameter.shape)


def transformer_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated decoder layers of a Hugging Face model: the modules named in its ``_no_split_modules``."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise ValueError(
            "sharding needs a model class that names its decoder layers in _no_split_modules, got "
            f"{type(model).__name__}."
        )
    return layers


def gather_full_tensors(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Full tensors, detached, in ``dtype``; one collective for all that are sharded, after the cast."""
    detached = [tensor.detach() for tensor in tensors]
    gathered = iter(_gather([tensor for tensor in detached if _is_divided(tensor)], dtype))
    return [
        next(gathered) if _is_divided(tensor) else gather_full_tensor(tensor).to(dtype) for tensor in detached
    ]


def _is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks hold different shards of the tensor, not only copies."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.size(-1) > 1


def _gather(shards: Sequence[DTensor], dtype: torch.dtype) -> list[Tensor]:
    """Full tensors of ``shards`` of one mesh, placed as ``_placements``; each group gathers by itself."""
    if not shards:
        return []
    mesh = shards[0].device_mesh
    ranks = mesh.size(-1)
    rows = [-(-shard.shape[0] // ranks) for shard in shards]  # the last ranks may have fewer, or none
    sizes = [count * shard.shape[1:].numel() for count, shard in zip(rows, shards, strict=True)]
    local_values = torch.zeros(sum(sizes), dtype=dtype, device=shards[0].to_local().device)
    for shard, part in zip(shards, local_values.split(sizes), strict=True):
        local = shard.to_local().reshape(-1)
        part[: local.numel()].copy_(local)
    gathered = local_values.new_empty(ranks * local_values.numel())
    # As bytes: gloo does not support every dtype.
    dist.all_gather_single(
        gathered.view(torch.uint8), local_values.view(torch.uint8), group=mesh.get_group(-1)
    )
    parts = gathered.view(ranks, -1).split(sizes, dim=1)
    return [
        part.reshape(-1, *shard.shape[1:])[: shard.shape[0]]
        for part, shard in zip(parts, shards, strict=True)
    ]


def add_product(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """``weight + scale * left @ right`` in fp32, detached; a shard where ``weight`` and ``left`` are
    shards."""
    rows = own_rows(weight) + scale * (own_rows(left) @ right)
    if not isinstance(weight, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's rows in float32, detached; all of them where the tensor is no shard."""
    return local_tensor(tensor).float()


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, by a collective; a tensor that is no shard itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, without its gradient."""
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()
