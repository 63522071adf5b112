"""Both ends of a lent bucket as objects for a process of their own; for tests of shared memory."""

import os

import torch
from torch import Tensor, nn

from verl_rc.runtime.weight_sync.manifest import TensorSpec
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle, copy_bucket, share_bucket

CPU = torch.device("cpu")


class Borrower:
    """Copies lent buckets, as an engine's worker does."""

    def copied(self, handle: BucketHandle, device: str = "cpu") -> list[float]:
        return copy_bucket(handle, torch.device(device)).float().tolist()

    def die_after_reading(self, handle: BucketHandle) -> None:
        copy_bucket(handle, CPU)
        os._exit(1)


class Lender:
    """Lends one bucket and never takes it back."""

    def lend(self, values: list[float]) -> str:
        part = torch.tensor(values)
        self.bucket = share_bucket([TensorSpec("w", "float32", tuple(part.shape))], [part])
        return str(self.bucket.export())


def linear_stack() -> nn.Module:
    """Two linear layers whose weights are known everywhere without being sent."""
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))


def expected_parts() -> dict[str, Tensor]:
    """What a bf16 sender of ``linear_stack`` must lend."""
    return {name: p.detach().to(torch.bfloat16) for name, p in linear_stack().named_parameters()}


def copied_tensors(handle: BucketHandle) -> dict[str, torch.Tensor]:
    parts = copy_bucket(handle, CPU).split([spec.num_elements for spec in handle.tensors])
    return {spec.name: part.view(spec.shape) for spec, part in zip(handle.tensors, parts, strict=True)}
