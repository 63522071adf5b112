"""The sending end of a weight update: gather, cast to the wire dtype, digest, then broadcast or lend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from verl_rc.runtime.distributed.fsdp import gather_full_tensors, own_rows
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec, tensor_digest
from verl_rc.runtime.weight_sync.shared_bucket import (
    BucketHandle,
    SharedBucket,
    device_key,
    fill,
    share_bucket,
    without_expandable_segments,
)
from verl_rc.runtime.weight_sync.transfer_group import (
    TransferAddress,
    TransferBrokenError,
    TransferGroup,
    broadcast_from_sender,
    join_transfer_group,
)

_GATHERED_BYTES = 512 << 20
"""Weights that one collective gathers: a layer of a 7B model in bf16."""


@dataclass(frozen=True)
class SendReceipt:
    """The tensors that the sender sent."""

    digests: dict[str, int]
    """Digest of every tensor, by name."""


class WeightSource(Protocol):
    """A model's weights by the engines' names, with adapters apart or merged."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the order in which they are sent."""

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Full tensors of these weights, detached, in ``dtype``; collective over the trainer ranks."""

    def constant(self) -> frozenset[str]:
        """Names of weights that training never changes and engines keep: they are sent once."""

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's rows, float32, of each weight that training changes; collective."""


def every_name(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters by all their names: a tied output head has the embedding's parameter under a second name.

    An engine gets it under both. vLLM's reload gives the head a parameter of its own, and on a CPU the head
    computes with a packed copy of it.
    """
    return model.named_parameters(remove_duplicate=False)


class ModelWeights:
    """The parameters of a model, sharded or not."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: its weights are read when they are sent."""
        self._model = model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's names and full shape."""
        return {name: tuple(parameter.shape) for name, parameter in every_name(self._model)}

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Full parameters; collective over the trainer ranks."""
        return gather_full_tensors([self._model.get_parameter(name) for name in names], dtype)

    def constant(self) -> frozenset[str]:
        """No parameter is constant: every update has all of them."""
        return frozenset()

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with a gradient."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, own_rows(parameter)


class WeightSender:
    """Gives a model's weights to the engines; gathering them is collective over the trainer ranks.

    Either ``join`` once and ``send`` every update: rank 0 broadcasts. Or, where engines live on the trainer's
    devices, ``offer`` one bucket after the other on every rank, then ``release``. A ``full`` update has all
    tensors, any other one only those that training changes.
    """

    def __init__(
        self, weights: WeightSource, rank: int, device: torch.device, wire_dtype: str, bucket_bytes: int
    ) -> None:
        """Plan the updates of ``weights``.

        Args:
            weights: The weights that are sent.
            rank: The number of this trainer rank; rank 0 broadcasts and computes digests.
            device: The device of the weights during an update; between updates they may rest in host memory.
            wire_dtype: The engine's parameter dtype, to which it would round anyway: half the bytes travel.
            bucket_bytes: Largest bucket of more than one tensor.
        """
        self._weights = weights
        self._rank = rank
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._group: TransferGroup | None = None
        self._lent: SharedBucket | None = None
        self._memory: Tensor | None = None
        """Memory of a GPU in which buckets are lent."""
        self._holds_memory = False
        self._digests: dict[str, int] = {}
        self.manifest = Manifest(
            tuple(TensorSpec(name, wire_dtype, shape) for name, shape in weights.shapes().items())
        )
        self._constant = weights.constant()

    def join(self, address: TransferAddress, backend: str) -> None:
        """Open the transfer group (rank 0 only; the others have no part in it)."""
        if self._rank == 0:
            self._group = join_transfer_group(address, rank=0, backend=backend)

    def update_manifest(self, full: bool) -> Manifest:
        """The manifest of an update."""
        return self.manifest if full else self.manifest.without(self._constant)

    def send(self, full: bool = True) -> SendReceipt:
        """Broadcast every tensor of an update; collective over the trainer ranks.

        Raises ``TransferBrokenError`` when an engine is gone, after it has left the group, which the other
        engines notice, and gathered the remaining tensors with the other ranks. ``join`` opens another group.
        """
        self._digests = {}
        failure = None
        memory = None if self._group is None else self._allocate_bucket()
        for bucket in self._buckets(full):
            # Rank 0 gathers after a failure, too: the other ranks wait in this collective.
            if self._group is None or memory is None:
                self._gather_and_discard(bucket)
                continue
            # One broadcast a bucket: with gloo, 1 MB a broadcast took twice as long as 64 MB.
            wire = memory.view(bucket[0].torch_dtype)[: sum(spec.num_elements for spec in bucket)]
            fill(wire, self._wire_tensors(bucket))
            try:
                broadcast_from_sender(self._group, wire)
            except TransferBrokenError as error:
                # The last reference: the group closes its connections, and the other engines notice.
                failure, self._group = error, None
        if failure is not None:
            raise failure
        return SendReceipt(dict(self._digests))

    def num_buckets(self, full: bool = True) -> int:
        """Number of buckets of an update."""
        return len(self._buckets(full))

    def device_key(self) -> str:
        """Key of the device whose memory this rank can lend."""
        return device_key(self._device)

    def offer(self, index: int, share: bool, full: bool = True) -> BucketHandle:
        """Lend bucket ``index`` of an update in memory of this rank's device; collective over the trainer
        ranks.

        A rank with ``share=False`` only takes part in gathering. The engines must have copied the previous
        bucket, whose memory is used again: one bucket is the largest extra memory.
        """
        if index == 0:
            self._digests = {}
        if share and self._memory is None and self._device.type != "cpu":
            self._memory = self._allocate_bucket()
        self._release_bucket()
        bucket = self._buckets(full)[index]
        if not share:
            self._gather_and_discard(bucket)
            return BucketHandle(tuple(bucket), {})
        self._lent = share_bucket(bucket, self._wire_tensors(bucket), self._memory)
        return BucketHandle(tuple(bucket), {self.device_key(): self._lent.export()})

    def release(self, interrupted: bool = False) -> SendReceipt:
        """Free the last bucket, after a complete or an ``interrupted`` update. The receipt lists the offered
        tensors.

        An engine that died in an update never unmaps the bucket: its memory serves all later updates.
        """
        self._release_bucket()
        self._holds_memory = self._holds_memory or interrupted
        if not self._holds_memory:
            self._memory = None
        return SendReceipt(dict(self._digests))

    def _buckets(self, full: bool) -> list[list[TensorSpec]]:
        return list(self.update_manifest(full).buckets(self._bucket_bytes))

    def _allocate_bucket(self) -> Tensor:
        """Memory of the largest bucket, uint8."""
        size = max(sum(spec.num_bytes for spec in bucket) for bucket in self._buckets(full=True))
        with without_expandable_segments():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _release_bucket(self) -> None:
        if self._lent is not None:
            self._lent.release()
            self._lent = None

    def _gather_and_discard(self, bucket: list[TensorSpec]) -> None:
        for _ in self._wire_tensors(bucket):
            pass

    def _wire_tensors(self, bucket: list[TensorSpec]) -> Iterator[Tensor]:
        """The bucket's full tensors, flat, in the wire dtype, one at a time; rank 0 records their digests."""
        for specs in Manifest(tuple(bucket)).buckets(_GATHERED_BYTES):
            weights = self._weights.gather([spec.name for spec in specs], bucket[0].torch_dtype)
            for spec, weight in zip(specs, weights, strict=True):
                wire = weight.reshape(-1)
                # The digest of the wire tensor: the engine digests the tensor that it receives.
                if self._rank == 0:
                    self._digests[spec.name] = tensor_digest(wire)
                yield wire
