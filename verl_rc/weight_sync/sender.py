"""The trainer's end of a weight update: gather, cast to the wire dtype, digest, broadcast."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from verl_rc.distributed.fsdp import gather_full_tensor
from verl_rc.weight_sync.manifest import Manifest, TensorSpec, tensor_digest
from verl_rc.weight_sync.transfer_group import Group, TransferAddress, broadcast_from_sender, join_transfer_group


@dataclass(frozen=True)
class SendReceipt:
    """What the sender put on the wire: a digest per tensor, and the bytes in all."""

    digests: dict[str, int]
    num_bytes: int


class WeightSender:
    """Sends a model's parameters to the engines. Every trainer rank takes part in gathering; only rank 0 broadcasts."""

    def __init__(self, model: nn.Module, rank: int, wire_dtype: str, bucket_bytes: int) -> None:
        """``wire_dtype`` is the engine's parameter dtype: the engine would round to it anyway, and half the bytes
        travel."""
        self._model = model
        self._rank = rank
        self._bucket_bytes = bucket_bytes
        self._group: Group | None = None
        self.manifest = Manifest(
            tuple(TensorSpec(name, wire_dtype, tuple(p.shape)) for name, p in model.named_parameters())
        )

    def join(self, address: TransferAddress, backend: str) -> None:
        """Open the transfer group (rank 0 only; the others have no part in it)."""
        if self._rank == 0:
            self._group = join_transfer_group(address, rank=0, backend=backend)

    def send(self) -> SendReceipt:
        """Send every tensor of the manifest; collective over the trainer ranks."""
        tensors = self._full_tensors()
        if self._group is None:
            for _ in tensors:
                pass
            return SendReceipt({}, 0)
        digests: dict[str, int] = {}
        for bucket in self.manifest.buckets(self._bucket_bytes):
            flat = torch.cat(list(self._take(tensors, bucket, digests)))
            broadcast_from_sender(self._group, flat)
        return SendReceipt(digests, self.manifest.num_bytes)

    def _full_tensors(self) -> Iterator[Tensor]:
        for _, parameter in self._model.named_parameters():
            yield gather_full_tensor(parameter)

    @staticmethod
    def _take(tensors: Iterable[Tensor], bucket: list[TensorSpec], digests: dict[str, int]) -> Iterator[Tensor]:
        for spec, tensor in zip(bucket, tensors, strict=False):
            wire = tensor.detach().reshape(-1).to(spec.torch_dtype)
            digests[spec.name] = tensor_digest(wire)
            yield wire
