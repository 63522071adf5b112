"""Reductions over the data-parallel group (never the whole world)."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def all_reduce_sum(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """``tensor`` summed over the data-parallel ranks, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=mesh.get_group())
    return tensor


def all_reduce_max(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Element-wise maximum of ``tensor`` over the data-parallel ranks, in place."""
    if mesh.size() > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=mesh.get_group())
    return tensor


def all_gather_vector(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The vectors ``[K]`` of all data-parallel ranks, one behind the other: ``[ranks * K]``."""
    if mesh.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(parts, tensor, group=mesh.get_group())
    return torch.cat(parts)
