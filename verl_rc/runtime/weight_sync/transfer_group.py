"""The process group that carries weights, apart from the default groups of trainer and engine."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_rc.runtime.distributed.process_group import open_store

_POLL_SECONDS = 0.001
TRANSFER_TIMEOUT_SECONDS = 120.0
"""Time limit of joining and of each broadcast. Members join when all of them are built, and a bucket takes
seconds: a member that takes longer is gone."""


class TransferBrokenError(RuntimeError):
    """A member of the transfer group is gone; the group cannot be used again."""


@dataclass(frozen=True)
class TransferAddress:
    """Address at which the members of the transfer group meet."""

    host: str
    port: int
    world_size: int
    """One sender plus every engine worker."""
    timeout_seconds: float = TRANSFER_TIMEOUT_SECONDS


@dataclass(frozen=True)
class TransferGroup:
    """A joined group."""

    process_group: Any
    """A ``ProcessGroupGloo`` or ``ProcessGroupNCCL``: torch's stubs know neither as a ``ProcessGroup`` nor
    their options."""
    backend: str
    timeout_seconds: float


def join_transfer_group(address: TransferAddress, rank: int, backend: str) -> TransferGroup:
    """Join as ``rank`` (0 is the sender); blocks until all ``world_size`` members have joined.

    The group has a store of its own: the default group of the engine's process must not be touched.
    ``backend`` is ``gloo`` or ``nccl``.
    """
    timeout = timedelta(seconds=address.timeout_seconds)
    tcp = open_store(address.host, address.port, address.world_size, rank == 0, timeout)
    # No init_process_group: a process has one default group, and vLLM's workers use theirs.
    store = dist.PrefixStore("weight_transfer", tcp)
    if backend == "gloo":
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timeout
        # Devices as init_process_group chooses them; the default device is that of the host name.
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        interfaces = [gloo.create_device(interface=name) for name in names]
        options._devices = interfaces or [gloo.create_default_device()]
        return TransferGroup(gloo(store, rank, address.world_size, options), backend, address.timeout_seconds)
    nccl_options = dist.ProcessGroupNCCL.Options()
    # torch's watchdog kills the process after this time; the deadline of ``broadcast_from_sender`` comes
    # first.
    nccl_options._timeout = 2 * timeout
    nccl = dist.ProcessGroupNCCL(store, rank, address.world_size, nccl_options)
    group = TransferGroup(nccl, backend, address.timeout_seconds)
    # NCCL connects in the first collective, and waits for dead members: now all have just joined.
    broadcast_from_sender(group, torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())))
    return group


def broadcast_from_sender(group: TransferGroup, tensor: Tensor) -> None:
    """Broadcast ``tensor`` in place from rank 0 and wait for it.

    Raises ``TransferBrokenError`` when a member is gone, or does not take part within the group's
    ``timeout_seconds``.
    """
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    try:
        work = group.process_group.broadcast([tensor], options)
        if group.backend == "nccl":
            _wait_until_completed(group, work)
        # NCCL's wait() orders streams and raises errors; gloo's waits, at most for the group's timeout.
        work.wait()
    except RuntimeError as error:
        raise TransferBrokenError(
            f"the weights did not get from the trainer to every engine: {error}"
        ) from error


def _wait_until_completed(group: TransferGroup, work: Any) -> None:
    """Wait for a collective of NCCL. After the deadline abort the group and raise ``RuntimeError``."""
    deadline = time.monotonic() + group.timeout_seconds
    while not work.is_completed():
        if time.monotonic() > deadline:
            group.process_group.abort()  # its kernel would wait on the device for ever
            raise RuntimeError(f"a member did not take part within {group.timeout_seconds:g} s")
        time.sleep(_POLL_SECONDS)
