"""The sending end of a weight update: gather, cast to the wire dtype, digest, then broadcast or lend."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from verl_rc.distributed.fsdp import gather_full_tensors, own_rows
from verl_rc.weight_sync.manifest import Manifest, TensorSpec, tensor_digest
from verl_rc.weight_sync.shared_bucket import (
    BucketHandle,
    SharedBucket,
    device_key,
    fill,
    share_bucket,
    without_expandable_segments,
)
from verl_rc.weight_sync.transfer_group import (
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
    """What the sender sent: a digest of each tensor."""

    digests: dict[str, int]


class WeightSource(Protocol):
    """Weights as engines know them: those of a model, or merged with adapters."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, in the order in which they are sent."""

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """These weights, whole, detached and cast before they travel; collective over the trainer ranks."""

    def constant(self) -> frozenset[str]:
        """Names of those that no training changes and that engines keep: they are sent once."""

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Name and this rank's rows, float32, of every weight that training changes; collective."""


class ModelWeights:
    """The parameters of a model, sharded or not, as they are."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` may change its weights at any time; they are looked up when they are sent."""
        self._model = model

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and whole shape."""
        return {name: tuple(parameter.shape) for name, parameter in self._model.named_parameters()}

    def gather(self, names: Sequence[str], dtype: torch.dtype) -> list[Tensor]:
        """Whole parameters; collective over the trainer ranks."""
        return gather_full_tensors([self._model.get_parameter(name) for name in names], dtype)

    def constant(self) -> frozenset[str]:
        """None: every update has all parameters."""
        return frozenset()

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters with a gradient."""
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                yield name, own_rows(parameter)


class WeightSender:
    """Gives a model's parameters to the engines; gathering them is collective over the trainer ranks.

    Either ``join`` once and ``send`` every update: rank 0 broadcasts. Or, where engines live on the trainer's
    devices, ``offer`` one bucket after the other on every rank, and ``release`` in the end. An update has all
    tensors, or, where ``whole`` is False, those that training changes.
    """

    def __init__(
        self, weights: WeightSource, rank: int, device: torch.device, wire_dtype: str, bucket_bytes: int
    ) -> None:
        """``device`` is where the weights are while they are sent; between updates they may rest in host
        memory.

        ``wire_dtype`` is the engine's parameter dtype: the engine would round to it anyway, and half the
        bytes travel.
        """
        self._weights = weights
        self._rank = rank
        self._device = device
        self._bucket_bytes = bucket_bytes
        self._group: TransferGroup | None = None
        self._lent: SharedBucket | None = None
        self._memory: Tensor | None = None
        """Memory of a GPU in which buckets are lent."""
        self._keeps_memory = False
        self._digests: dict[str, int] = {}
        self.manifest = Manifest(
            tuple(TensorSpec(name, wire_dtype, shape) for name, shape in weights.shapes().items())
        )
        self._constant = weights.constant()

    def join(self, address: TransferAddress, backend: str) -> None:
        """Open the transfer group (rank 0 only; the others have no part in it)."""
        if self._rank == 0:
            self._group = join_transfer_group(address, rank=0, backend=backend)

    def manifest_of(self, whole: bool) -> Manifest:
        """The tensors of an update."""
        return self.manifest if whole else self.manifest.without(self._constant)

    def send(self, whole: bool = True) -> SendReceipt:
        """Broadcast every tensor of an update; collective over the trainer ranks.

        Raises ``TransferBrokenError`` when an engine is gone. Before that the sender leaves the group, which
        the other engines notice, and gathers the remaining tensors with the other ranks. ``join`` opens
        another group.
        """
        self._digests = {}
        broken = None
        memory = None if self._group is None else self._memory_of_a_bucket()
        for bucket in self._buckets(whole):
            # Rank 0 goes on gathering after a failure: that is a collective which the other ranks wait in.
            if self._group is None or memory is None:
                self._gather_only(bucket)
                continue
            # One broadcast a bucket: with gloo, 1 MB a broadcast took twice as long as 64 MB.
            wire = memory.view(bucket[0].torch_dtype)[: sum(spec.num_elements for spec in bucket)]
            fill(wire, self._wire_tensors(bucket))
            try:
                broadcast_from_sender(self._group, wire)
            except TransferBrokenError as error:
                # Without a reference the group closes its connections, which tells the other engines.
                broken, self._group = error, None
        if broken is not None:
            raise broken
        return SendReceipt(dict(self._digests))

    def num_buckets(self, whole: bool = True) -> int:
        """How many buckets make one update."""
        return len(self._buckets(whole))

    def device_key(self) -> str:
        """The device this rank can lend memory of."""
        return device_key(self._device)

    def offer(self, index: int, share: bool, whole: bool = True) -> BucketHandle:
        """Lend bucket ``index`` of an update in memory of this rank's device; collective over the trainer
        ranks.

        A rank with ``share=False`` only takes part in gathering. The engines must have copied the previous
        bucket, whose memory is used again: extra memory is one bucket at most.
        """
        if index == 0:
            self._digests = {}
        if share and self._memory is None and self._device.type != "cpu":
            self._memory = self._memory_of_a_bucket()
        self._release_bucket()
        bucket = self._buckets(whole)[index]
        if not share:
            self._gather_only(bucket)
            return BucketHandle(tuple(bucket), {})
        self._lent = share_bucket(bucket, self._wire_tensors(bucket), self._memory)
        return BucketHandle(tuple(bucket), {self.device_key(): self._lent.export()})

    def release(self, interrupted: bool = False) -> SendReceipt:
        """Free the last bucket, after a complete or an ``interrupted`` update. The receipt lists what was
        offered.

        An engine that died in an update never returns the bucket that it mapped: its memory is kept for all
        later updates.
        """
        self._release_bucket()
        self._keeps_memory = self._keeps_memory or interrupted
        if not self._keeps_memory:
            self._memory = None
        return SendReceipt(dict(self._digests))

    def _buckets(self, whole: bool) -> list[list[TensorSpec]]:
        return list(self.manifest_of(whole).buckets(self._bucket_bytes))

    def _memory_of_a_bucket(self) -> Tensor:
        """uint8, for the largest bucket."""
        size = max(sum(spec.num_bytes for spec in bucket) for bucket in self._buckets(whole=True))
        with without_expandable_segments():
            return torch.empty(size, dtype=torch.uint8, device=self._device)

    def _release_bucket(self) -> None:
        if self._lent is not None:
            self._lent.release()
            self._lent = None

    def _gather_only(self, bucket: list[TensorSpec]) -> None:
        for _ in self._wire_tensors(bucket):
            pass

    def _wire_tensors(self, bucket: list[TensorSpec]) -> Iterator[Tensor]:
        """The bucket's tensors, whole, flat and in the wire dtype, one at a time; rank 0 notes their
        digests."""
        for specs in Manifest(tuple(bucket)).buckets(_GATHERED_BYTES):
            weights = self._weights.gather([spec.name for spec in specs], bucket[0].torch_dtype)
            for spec, weight in zip(specs, weights, strict=True):
                wire = weight.reshape(-1)
                # Of what is sent: the engine can only digest what it receives.
                if self._rank == 0:
                    self._digests[spec.name] = tensor_digest(wire)
                yield wire
