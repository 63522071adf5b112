"""Process group of the trainer ranks: rendezvous, data-parallel mesh and reductions over it."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_rc.runtime.distributed.network import take_listener


def open_store(
    host: str, port: int, world_size: int | None, is_server: bool, timeout: timedelta
) -> dist.TCPStore:
    """Serve, or connect to, a key-value store; the server listens at ``host`` alone, and waits for the others
    of ``world_size``, unless it is None.

    torch would listen on every interface, where any process could write into the store.
    """
    if not is_server:
        return dist.TCPStore(host, port, world_size, False, timeout, wait_for_workers=True)
    listener = take_listener(host, port)
    # detach(): the store closes the descriptor; Python must not close it too.
    return dist.TCPStore(
        host,
        port,
        world_size,
        True,
        timeout,
        wait_for_workers=world_size is not None,
        master_listen_fd=listener.detach(),
    )


def serve_store(host: str, port: int) -> dist.TCPStore:
    """Serve the store of a process group of other processes, whose rank 0 this process starts later.

    By default rank 0 would serve it, on every interface, at a port that another process may have taken until
    then. With this variable of torch it connects to the store, as all others do.
    """
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = str(True)
    return open_store(host, port, None, is_server=True, timeout=timedelta(hours=1))


@dataclass(frozen=True)
class RankAddress:
    """This process's place among the trainer ranks."""

    rank: int
    world_size: int
    master_host: str
    master_port: int


def trainer_device(kind: str) -> torch.device:
    """The device of this process for ``trainer.device`` (``auto``, ``cpu`` or ``cuda``)."""
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "trainer.device=cuda needs a CUDA device, and torch finds none: verl-rc doctor says why. Use "
            "trainer.device=cpu or auto."
        )
    return torch.device(kind)


def join_trainer_group(
    address: RankAddress, device: torch.device, timeout_seconds: float = 600.0
) -> DeviceMesh:
    """Initialise the default process group of the trainer ranks; returns the one-dimensional data-parallel
    mesh.

    The models of a process share the group: the first one joins it.
    """
    if not dist.is_initialized():
        _initialise(address, device, timedelta(seconds=timeout_seconds))
    return init_device_mesh(device.type, (address.world_size,), mesh_dim_names=("data_parallel",))


def _initialise(address: RankAddress, device: torch.device, timeout: timedelta) -> None:
    os.environ.update(
        RANK=str(address.rank),
        WORLD_SIZE=str(address.world_size),
        LOCAL_RANK="0",
        MASTER_ADDR=address.master_host,
        MASTER_PORT=str(address.master_port),
    )
    if device.type == "cuda":
        torch.cuda.set_device(0)  # Ray shows a process its own GPU alone
    # With GPUs, tensors of both devices are reduced; torch refuses "cpu:gloo,cpu:gloo" as a duplicate.
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = open_store(
        address.master_host, address.master_port, address.world_size, address.rank == 0, timeout
    )
    dist.init_process_group(
        backend, store=store, rank=address.rank, world_size=address.world_size, timeout=timeout
    )


def leave_trainer_group() -> None:
    """Tear the default process group down."""
    if dist.is_initialized():
        dist.destroy_process_group()


__all__ = ["DeviceMesh", "RankAddress", "join_trainer_group", "leave_trainer_group", "trainer_device"]


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
    """The vectors ``[K]`` of all data-parallel ranks, concatenated: ``[ranks * K]``."""
    if mesh.size() == 1:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(parts, tensor, group=mesh.get_group())
    return torch.cat(parts)
