"""Objects in the processes of a stage: a member of an all-reduce, a lender of memory, and its borrower."""

import time
from typing import Any

import torch

from verl_rc.distributed.process_group import (
    RankAddress,
    all_reduce_sum,
    join_trainer_group,
    leave_trainer_group,
    trainer_device,
)
from verl_rc.weight_sync.manifest import TensorSpec, tensor_digest
from verl_rc.weight_sync.shared_bucket import (
    BucketHandle,
    SharedBucket,
    copy_bucket,
    device_key,
    share_bucket,
    without_expandable_segments,
)

_ROUNDS = 5


class RingMember:
    """One rank of an all-reduce over all ranks."""

    def __init__(self, device: str, address: RankAddress) -> None:
        """Join the group; blocks until all ranks have come."""
        self._device = trainer_device(device)
        self._mesh = join_trainer_group(address, self._device, timeout_seconds=60)

    def all_reduce(self, num_bytes: int) -> tuple[bool, float]:
        """Whether the sum of ``num_bytes`` of ones in float32 is right, and the seconds of an all-reduce."""
        values = torch.ones(num_bytes // 4, device=self._device)
        is_right = bool((all_reduce_sum(values, self._mesh) == self._mesh.size()).all())
        self._wait()
        start = time.perf_counter()
        for _ in range(_ROUNDS):
            all_reduce_sum(values, self._mesh)
        self._wait()
        return is_right, (time.perf_counter() - start) / _ROUNDS

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def close(self) -> None:
        """Leave the group."""
        leave_trainer_group()


class Lender:
    """Lends one tensor to another process on its device."""

    def __init__(self, device: str, num_bytes: int) -> None:
        """``num_bytes`` of random bfloat16 numbers."""
        self._device = trainer_device(device)
        self._tensor = torch.randn(num_bytes // 2, device=self._device).to(torch.bfloat16)
        self._lent: SharedBucket | None = None

    def lend(self) -> tuple[BucketHandle, int]:
        """The handle, and the digest of what it lends."""
        spec, memory = TensorSpec("tensor", "bfloat16", tuple(self._tensor.shape)), None
        if self._device.type == "cuda":
            with without_expandable_segments():
                memory = torch.empty(spec.num_bytes, dtype=torch.uint8, device=self._device)
        self._lent = share_bucket([spec], [self._tensor], memory)
        return BucketHandle((spec,), {device_key(self._device): self._lent.export()}), tensor_digest(
            self._tensor
        )

    def take_back(self) -> None:
        """Free the bucket."""
        assert self._lent is not None
        self._lent.release()


class Borrower:
    """Copies what another process lends."""

    def __init__(self, device: str) -> None:
        """On the same device as the lender."""
        self._device = trainer_device(device)

    def copy(self, handle: BucketHandle) -> tuple[int, float]:
        """The digest of the copy, and the seconds that copying took."""
        start = time.perf_counter()
        copied: Any = copy_bucket(handle, self._device)
        seconds = time.perf_counter() - start
        return tensor_digest(copied), seconds
