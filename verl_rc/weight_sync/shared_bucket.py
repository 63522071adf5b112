"""One bucket of weights in memory that another process on the same device maps: CUDA IPC, or shared memory on
a CPU.

Two ranks on one GPU cannot share an NCCL group, so where trainer and engine are colocated the bytes do not
travel at all: the trainer's rank lends a bucket, the engine's worker copies what it needs, and the rank takes
the memory back.
"""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from verl_rc.weight_sync.manifest import TensorSpec

_SHARED_MEMORY_FOLDER = Path("/dev/shm")
# Place of the device index among the arguments of torch's ``rebuild_cuda_tensor``: each process counts its
# own GPUs.
_DEVICE_ARGUMENT = 6


@dataclass(frozen=True)
class SharedMemoryHandle:
    """A bucket in shared host memory."""

    path: str


@dataclass(frozen=True)
class CudaIpcHandle:
    """A bucket in a GPU's memory, exported by CUDA IPC."""

    rebuild_arguments: tuple[Any, ...]
    """Arguments of torch's ``rebuild_cuda_tensor``; one export may be mapped once."""


@dataclass(frozen=True)
class BucketHandle:
    """Places of a bucket on each device. The driver passes on this handle only, never the weights."""

    tensors: tuple[TensorSpec, ...]
    """The bucket's tensors in order; they lie end to end and share one dtype."""
    by_device: Mapping[str, SharedMemoryHandle | CudaIpcHandle]
    """Places by the key of the device, see ``device_key``."""

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(spec.num_elements for spec in self.tensors)

    @classmethod
    def merged(cls, handles: "Sequence[BucketHandle]") -> "BucketHandle":
        """The handles of all trainer ranks for one bucket, as one."""
        by_device = {key: exported for handle in handles for key, exported in handle.by_device.items()}
        return cls(handles[0].tensors, by_device)


class HostBucket:
    """POSIX shared memory; should this process die, Python's resource tracker removes the segment."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        """Reserve the memory.

        Raises ``ValueError`` when ``/dev/shm`` has no room; without reserving, the first write would end the
        process.
        """
        num_bytes = max(1, sum(spec.num_bytes for spec in tensors))
        self._segment = SharedMemory(create=True, size=num_bytes)
        self._path = _SHARED_MEMORY_FOLDER / self._segment.name
        try:
            with self._path.open("r+b") as file:
                # SharedMemory only sets the size. /dev/shm takes its pages on the first write, and one that
                # finds no room ends the process with SIGBUS.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            self._remove()
            raise ValueError(
                f"{_SHARED_MEMORY_FOLDER} must have room for a bucket of {num_bytes / 2**20:.1f} MiB of "
                f"weights, the system answered: {error}. Lower "
                "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes, or give a "
                "container more shared memory (docker run --shm-size)."
            ) from error
        num_elements = sum(spec.num_elements for spec in tensors)
        self.flat = torch.frombuffer(self._segment.buf, dtype=tensors[0].torch_dtype, count=num_elements)

    def export(self) -> SharedMemoryHandle:
        """The segment's path."""
        return SharedMemoryHandle(str(self._path))

    def release(self) -> None:
        """Unmap and unlink the segment."""
        # The segment cannot be unmapped while a tensor still refers to it.
        del self.flat
        self._remove()

    def _remove(self) -> None:
        self._segment.close()
        self._segment.unlink()


class CudaBucket:
    """Memory of this process's GPU, exported by CUDA IPC."""

    def __init__(self, tensors: Sequence[TensorSpec], memory: Tensor) -> None:
        """In ``memory``, uint8 on the GPU, which may have been another bucket's."""
        self.flat = memory.view(tensors[0].torch_dtype)[: sum(spec.num_elements for spec in tensors)]

    def export(self) -> CudaIpcHandle:
        """A fresh export, once everything written has arrived in memory."""
        # An IPC handle shares memory, not the order of this process's streams.
        torch.cuda.synchronize(self.flat.device)
        _, arguments = reduce_tensor(self.flat)
        return CudaIpcHandle(arguments)

    def release(self) -> None:
        """Free the memory, and what earlier exports still held."""
        del self.flat
        # PyTorch frees exported memory that the importer has closed at its next export, or when asked to.
        torch.cuda.ipc_collect()


SharedBucket = HostBucket | CudaBucket
"""The lending end: memory from allocation to release. Its ``flat`` ``[num_elements]`` is to be filled before
``export`` is given away; ``release`` comes after the other process has copied it or was lost."""


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """What is allocated inside can be shared with another process.

    Memory of PyTorch's expandable segments is shared through a system call that containers forbid. PyTorch
    resets each option that is missing from the settings it is given, so they are the user's whole ones.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    without = re.sub(r"(expandable_segments\s*:\s*)(True|true|1)\b", r"\1False", settings)
    if without == settings:
        yield
        return
    torch.cuda.memory._set_allocator_settings(without)
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings(settings)


def fill(flat: Tensor, parts: Iterable[Tensor]) -> None:
    """Copy ``parts``, flat as well, one behind the other into ``flat``."""
    start = 0
    for part in parts:
        flat[start : start + part.numel()].copy_(part)
        start += part.numel()


def share_bucket(
    tensors: Sequence[TensorSpec], parts: Iterable[Tensor], memory: Tensor | None = None
) -> SharedBucket:
    """Lend ``parts`` (flat, in the order and dtype of ``tensors``) in ``memory`` of a GPU, or else in shared
    host memory."""
    bucket: SharedBucket = HostBucket(tensors) if memory is None else CudaBucket(tensors, memory)
    try:
        fill(bucket.flat, parts)
    # Also at KeyboardInterrupt: a segment of shared memory would outlive the process.
    except BaseException:
        bucket.release()
        raise
    return bucket


def copy_bucket(handle: BucketHandle, device: torch.device) -> Tensor:
    """A private copy ``[num_elements]`` of a lent bucket; the lender may take its memory back afterwards.

    Raises ``ValueError`` when the bucket is not offered on ``device``, ``RuntimeError`` when the memory is
    gone.
    """
    key = device_key(device)
    if key not in handle.by_device:
        raise ValueError(
            f"a bucket of weights must be offered on the engine's own device {key}, it is offered on "
            f"{sorted(handle.by_device) or 'none'}. Set "
            "actor_rollout_ref.rollout.checkpoint_engine.backend=broadcast when engines and trainer do not "
            "share their devices."
        )
    exported = handle.by_device[key]
    if isinstance(exported, SharedMemoryHandle):
        # A private mapping: read-only for the lender's memory, and unknown to the resource tracker of this
        # process, which would remove the segment under the lender's feet.
        dtype = handle.tensors[0].torch_dtype
        return torch.from_file(exported.path, shared=False, size=handle.num_elements, dtype=dtype).clone()
    arguments = list(exported.rebuild_arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device() if device.index is None else device.index
    lent = rebuild_cuda_tensor(*arguments)
    copied: Tensor = lent.clone()
    # The copy must be complete before the mapping ends: the lender knows nothing of this process's streams.
    torch.cuda.synchronize(device)
    return copied


def device_key(device: torch.device) -> str:
    """A name of the device that all processes share: the UUID of a GPU, the host name of a CPU."""
    if device.type == "cpu":
        return f"cpu@{socket.gethostname()}"
    # CUDA_VISIBLE_DEVICES lets every process count its GPUs from 0.
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_offering_ranks(rank_devices: Sequence[str], engine_devices: Iterable[str]) -> list[bool]:
    """Return for each trainer rank whether it has to offer buckets: one rank for every device that holds an
    engine worker.

    Raises ``ValueError`` when an engine worker's device holds no trainer rank.
    """
    needed = set(engine_devices)
    if without_rank := needed - set(rank_devices):
        raise ValueError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=ipc needs every engine worker on the device "
            f"of a trainer rank; without a rank: {sorted(without_rank)}."
        )
    return [
        device in needed and device not in rank_devices[:rank] for rank, device in enumerate(rank_devices)
    ]
