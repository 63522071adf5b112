"""The process group that carries weights: beside, never through, the default groups of trainer and engine."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from verl_rc.distributed.process_group import open_store

Group = Any
"""A ``ProcessGroupGloo`` or ``ProcessGroupNCCL``: torch's stubs know neither as a ``ProcessGroup`` nor their options."""
TRANSFER_TIMEOUT_SECONDS = 120.0
"""How long a member waits for the others to join, and for one broadcast: members join when all of them are built, and a bucket
takes seconds, so that whoever takes longer is gone."""


class TransferBrokenError(RuntimeError):
    """A member of the transfer group is gone; the group is of no use any more."""


@dataclass(frozen=True)
class TransferAddress:
    """Address at which the members of the transfer group meet."""

    host: str
    port: int
    world_size: int
    """One sender plus every engine worker."""
    timeout_seconds: float = TRANSFER_TIMEOUT_SECONDS


def join_transfer_group(address: TransferAddress, rank: int, backend: str) -> Group:
    """Join as ``rank`` (0 is the sender); blocks until all ``world_size`` members have come.

    Built by hand on its own store, because the engine's process has a default group of its own that must not be
    touched. ``backend`` is ``gloo`` or ``nccl``.
    """
    timeout = timedelta(seconds=address.timeout_seconds)
    tcp = open_store(address.host, address.port, address.world_size, rank == 0, timeout)
    # No init_process_group: a process has one default group, and vLLM's workers use theirs.
    store = dist.PrefixStore("weight_transfer", tcp)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # init_process_group would add a device; a group built by hand without one is refused.
        options._devices = [gloo.create_default_device()]
        return gloo(store, rank, address.world_size, options)
    if backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout  # the default is ten minutes
        return dist.ProcessGroupNCCL(store, rank, address.world_size, nccl_options)
    raise ValueError(f"the weight-transfer backend must be gloo or nccl, got {backend!r}.")


def broadcast_from_sender(group: Group, tensor: Tensor) -> None:
    """Broadcast ``tensor`` in place from rank 0 and wait for it. Raises ``TransferBrokenError`` when a member is gone."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        group.broadcast([tensor], options).wait()
    except RuntimeError as error:
        raise TransferBrokenError(f"the weights did not get from the trainer to every engine: {error}") from error
