"""One bucket of weights in memory that another process on the same device maps: CUDA IPC, or shared memory on
a CPU.

Two ranks on one GPU cannot share an NCCL group. So a trainer on the engine's device lends a bucket, the
engine's worker copies it, and the trainer takes the memory back.
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

from verl_rc.runtime.weight_sync.manifest import TensorSpec

_SHARED_MEMORY_FOLDER = Path("/dev/shm")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
"""A number of this start of the machine, which no other machine has."""
# Position of the device index in the arguments of torch's ``rebuild_cuda_tensor``: each process numbers its
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
    """Memory of a bucket on each device. The driver passes on this handle, never the weights."""

    tensors: tuple[TensorSpec, ...]
    """The bucket's tensors in order; they lie end to end and share one dtype."""
    by_device: Mapping[str, SharedMemoryHandle | CudaIpcHandle]
    """Handles by the key of the device, see ``device_key``."""

    @property
    def num_elements(self) -> int:
        """Number of elements of all tensors together."""
        return sum(spec.num_elements for spec in self.tensors)

    @classmethod
    def merged(cls, handles: "Sequence[BucketHandle]") -> "BucketHandle":
        """One handle from those of all trainer ranks for a bucket."""
        by_device = {key: export for handle in handles for key, export in handle.by_device.items()}
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
        """Use ``memory``, uint8 on the GPU, also that of an earlier bucket."""
        self.flat = memory.view(tensors[0].torch_dtype)[: sum(spec.num_elements for spec in tensors)]

    def export(self) -> CudaIpcHandle:
        """A fresh export, after all writes have finished."""
        # An IPC handle shares memory, not the order of this process's streams.
        torch.cuda.synchronize(self.flat.device)
        _, arguments = reduce_tensor(self.flat)
        return CudaIpcHandle(arguments)

    def release(self) -> None:
        """Free the memory, also that of earlier exports."""
        del self.flat
        # PyTorch frees exported memory that the importer has closed at its next export, or when asked to.
        torch.cuda.ipc_collect()


SharedBucket = HostBucket | CudaBucket
"""Memory that is lent. Fill ``flat`` ``[num_elements]`` before ``export``; ``release`` it after the other
process has copied the bucket or was lost."""


@contextmanager
def without_expandable_segments() -> Iterator[None]:
    """Let allocations inside be shared with another process.

    PyTorch shares memory of expandable segments by a system call that containers forbid. It resets every
    option that new settings lack, so these are the user's settings with one change.
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
    # Also after KeyboardInterrupt: a segment of shared memory would outlive the process.
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
    export = handle.by_device[key]
    if isinstance(export, SharedMemoryHandle):
        # A private mapping cannot change the lender's memory. This process's resource tracker, which would
        # remove the segment, does not know it.
        dtype = handle.tensors[0].torch_dtype
        return torch.from_file(export.path, shared=False, size=handle.num_elements, dtype=dtype).clone()
    arguments = list(export.rebuild_arguments)
    arguments[_DEVICE_ARGUMENT] = torch.cuda.current_device() if device.index is None else device.index
    mapped = rebuild_cuda_tensor(*arguments)
    copy: Tensor = mapped.clone()
    # The copy must be complete before the mapping ends: the lender does not wait for this process's streams.
    torch.cuda.synchronize(device)
    return copy


def device_key(device: torch.device) -> str:
    """A name of the device that is the same in all processes: a GPU's UUID, a CPU's host name and shared
    memory."""
    if device.type == "cpu":
        # Nodes may have the same host name, and containers of one machine the same boot.
        boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
        return f"cpu@{socket.gethostname()}/{boot}/{_SHARED_MEMORY_FOLDER.stat().st_dev}"
    # An index would not do: with CUDA_VISIBLE_DEVICES every process numbers its GPUs from 0.
    return str(torch.cuda.get_device_properties(device).uuid)


def choose_offering_ranks(rank_devices: Sequence[str], engine_devices: Iterable[str]) -> list[bool]:
    """Whether each trainer rank must offer buckets: the first rank on each device with an engine worker.

    Raises ``ValueError`` when an engine worker's device has no trainer rank.
    """
    needed = set(engine_devices)
    if uncovered := needed - set(rank_devices):
        raise ValueError(
            "actor_rollout_ref.rollout.checkpoint_engine.backend=ipc needs every engine worker on the device "
            f"of a trainer rank; without a rank: {sorted(uncovered)}."
        )
    return [
        device in needed and device not in rank_devices[:rank] for rank, device in enumerate(rank_devices)
    ]
