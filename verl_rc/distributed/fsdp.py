"""FSDP2: sharded fp32 master weights, a compute dtype, and gathering whole tensors."""

import math
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
    """The mesh over which weights are sharded: all ranks, or for a smaller ``size`` groups of so many
    neighbouring ranks.

    Of two dimensions then, ``replicate`` and ``shard``: every group has a copy, and gradients are summed over
    both.
    """
    ranks = data_parallel.size()
    if not 0 < size < ranks:
        return data_parallel
    return DeviceMesh(
        data_parallel.device_type, data_parallel.mesh.view(-1, size), mesh_dim_names=("replicate", "shard")
    )


def _cut(mesh: DeviceMesh) -> list[Placement]:
    """How parameters lie on a mesh: cut along their first dimension over its last one, and copied over the
    other."""
    return [*[Replicate()] * (mesh.ndim - 1), Shard(0)]


def cut_parameters(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace each parameter by this rank's shard of it, cut as ``shard_model`` cuts.

    On the meta device, before weights are read: transformers then reads no more of a tensor than its shard.
    """
    shards: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            # No source rank: nothing is sent, every rank cuts its own part of what it has.
            shard = distribute_tensor(parameter, mesh, _cut(mesh), src_data_rank=None)
            setattr(module, name, shards.setdefault(parameter, nn.Parameter(shard, parameter.requires_grad)))


def shard_model(
    model: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool = True
) -> FSDPModule:
    """Shard ``model`` over a ``sharding_mesh``, one unit per transformer layer, reducing gradients in fp32.

    Parameters may be whole, or this rank's shards from ``cut_parameters``.
    """
    # Gradients are summed in float32: a sum over ranks in bfloat16 loses small contributions.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    with whole_parameters(model, _on_meta):
        # Layers first: the last call takes the parameters that no layer has taken (embeddings, norm, head).
        for layer in transformer_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # FSDP2 looks again at its modules' parameters when the model is moved. Cloned: what was read lies in the
    # mapped file, where others may write.
    model._apply(torch.clone)
    assert isinstance(model, FSDPModule)
    if mesh.ndim > 1:
        _copy_from_first_group(model, mesh)
    return model


def _copy_from_first_group(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give every group the first one's weights: what is drawn at random (adapters) each group has drawn by
    itself."""
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        dist.broadcast(parameter.to_local().detach(), group=mesh.get_group("replicate"), group_src=0)


@contextmanager
def whole_parameters(model: nn.Module, empty: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the context, parameters that are shards have their whole size, but no memory; ``empty`` makes
    such a tensor.

    For code that goes by the sizes of parameters. Whether they are trained may change inside.
    """
    shards: list[tuple[nn.Module, str, nn.Parameter]] = []
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                shards.append((module, name, parameter))
                # A tied parameter is one tensor in two modules, before and after.
                whole = nn.Parameter(empty(parameter), parameter.requires_grad)
                setattr(module, name, wholes.setdefault(parameter, whole))
    try:
        yield
    finally:
        for module, name, shard in shards:
            setattr(module, name, shard.requires_grad_(getattr(module, name).requires_grad))


def without_memory(parameter: Tensor) -> Tensor:
    """A tensor as large as ``parameter`` in which one number stands for all."""
    return torch.empty((), dtype=parameter.dtype).expand(parameter.shape)


def _on_meta(parameter: Tensor) -> Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


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
    """Whole tensors behind shards, detached, in ``dtype``; one collective for all that are sharded, of values
    already cast."""
    here = [tensor.detach() for tensor in tensors]
    gathered = iter(_gather([one for one in here if _is_divided(one)], dtype))
    return [next(gathered) if _is_divided(one) else gather_full_tensor(one).to(dtype) for one in here]


def _is_divided(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether other ranks hold parts of the tensor, not only copies."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.size(-1) > 1


def _gather(shards: Sequence[DTensor], dtype: torch.dtype) -> list[Tensor]:
    """Of one mesh, all cut along their first dimension over its last one; each of its groups gathers by
    itself."""
    if not shards:
        return []
    mesh = shards[0].device_mesh
    ranks = mesh.size(-1)
    rows = [-(-shard.shape[0] // ranks) for shard in shards]  # the last ranks may have fewer, or none
    sizes = [count * shard.shape[1:].numel() for count, shard in zip(rows, shards, strict=True)]
    mine = torch.zeros(sum(sizes), dtype=dtype, device=shards[0].to_local().device)
    for shard, part in zip(shards, mine.split(sizes), strict=True):
        local = shard.to_local().reshape(-1)
        part[: local.numel()].copy_(local)
    everyone = torch.empty(ranks * mine.numel(), dtype=dtype, device=mine.device)
    # As bytes: gloo does not know every type of number.
    dist.all_gather_single(everyone.view(torch.uint8), mine.view(torch.uint8), group=mesh.get_group(-1))
    parts = everyone.view(ranks, -1).split(sizes, dim=1)
    return [
        part.reshape(-1, *shard.shape[1:])[: shard.shape[0]]
        for part, shard in zip(parts, shards, strict=True)
    ]


def add_product(weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
    """``weight + scale * left @ right`` in fp32, detached; where ``weight`` and ``left`` are shards, on this
    rank's rows."""
    if not isinstance(weight, DTensor):
        return weight.detach().float() + scale * (left.detach().float() @ right)
    assert isinstance(left, DTensor)
    rows = weight.to_local().detach().float() + scale * (left.to_local().detach().float() @ right)
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
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().float()


def cosine(pairs: Sequence[tuple[Tensor, Tensor]]) -> float | None:
    """Of the whole tensors behind the shards of all pairs, taken as two vectors; collective. None: one is
    0."""
    flat = [[own_rows(tensor).reshape(-1) for tensor in pair] for pair in pairs]
    products = [torch.stack([torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)]) for a, b in flat]
    sums = torch.stack(products).double().sum(0)
    # Where ranks hold copies, each of the three sums counts them equally often: the ratio stays.
    dist.all_reduce(sums)
    product, *squares = sums.tolist()
    return product / math.sqrt(math.prod(squares)) if all(squares) else None


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor behind a shard; a collective when it is sharded, the tensor itself otherwise."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
