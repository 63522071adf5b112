"""The receiver of weight updates, a weight-transfer backend of vLLM. Importing this module registers it.

Weights are loaded by vLLM's layerwise reload, the only method that always works: on a CPU vLLM prepacks
weights after loading and empties the parameters, and a quantised engine must quantise them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.utils.nccl import unpinned_nccl_env

from verl_rc.runtime.rollout.vllm.adapters import attach_layers, detach_adapter_layers
from verl_rc.runtime.rollout.vllm.float32_head import forget_float32_heads
from verl_rc.runtime.rollout.vllm.load_record import LoadRecord, by_loaders
from verl_rc.runtime.weight_sync.manifest import Manifest, TensorSpec, is_adapter, tensor_digest
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle, copy_bucket
from verl_rc.runtime.weight_sync.transfer_group import (
    TransferAddress,
    TransferGroup,
    broadcast_from_sender,
    join_transfer_group,
)

BACKEND_NAME = "verl_rc"
Bucket = tuple[Sequence[TensorSpec], Tensor]
"""Tensors of one dtype, and their elements in one flat tensor."""


@dataclass
class ReceiverAddress(WeightTransferInitInfo):
    """Place of this engine's workers in the transfer group."""

    address: TransferAddress
    first_rank: int
    """Rank of the engine's first worker in the group; its tensor-parallel workers follow."""
    process_group_backend: str


@dataclass
class ReceiveRequest(WeightTransferUpdateInfo):
    """A request to load a broadcast update, a staged update or a lent bucket."""

    source: tuple[Manifest, int] | list[Bucket] | BucketHandle
    """Manifest and bytes a bucket of a broadcast update; or the buckets of ``WeightReceiver.stage``; or the
    handle of a lent bucket."""


class WeightReceiver(WeightTransferEngine[ReceiverAddress, ReceiveRequest]):
    """Receives buckets by broadcast or from lent memory, digests each tensor, and loads it by layerwise
    reload."""

    init_info_cls = ReceiverAddress
    update_info_cls = ReceiveRequest

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments that vLLM passes to every weight-transfer engine."""
        super().__init__(*arguments, **options)
        self._group: TransferGroup | None = None
        self._updating = False
        self._holds_weights = False
        """An engine with adapters has all weights, so that an update may bring the adapter alone."""
        self._layers: dict[str, nn.Module] | None = None
        """Layers with adapters that are detached while the model is in loadable form. None if it is not."""
        self.digests: dict[str, int] = {}
        self._record: LoadRecord | None = None
        """What the update has loaded. None if it has brought no weights of the model."""
        self.adapter: dict[str, Tensor] = {}
        """The factors that the update brought, by name."""

    @property
    def not_loaded(self) -> list[str]:
        """Parameters that the update must fill, and that no loader has written."""
        return [] if self._record is None else sorted(self._record.missing())

    @property
    def unread(self) -> list[str]:
        """Tensors of the update that the engine's model has no use for, unless it has another one with the
        same numbers, such as a tied head."""
        if self._record is None:
            return []
        names = self._record.unread
        read = {digest for name, digest in self.digests.items() if name not in names}
        return sorted(name for name in names if self.digests[name] not in read)

    def init_transfer_engine(self, init_info: ReceiverAddress) -> None:
        """Join the transfer group; lent buckets need none."""
        rank = init_info.first_rank + self.vllm_config.parallel_config.rank
        # The other members do not have the settings of vLLM's batch-invariant mode: NCCL would hang.
        with unpinned_nccl_env():
            self._group = join_transfer_group(init_info.address, rank, init_info.process_group_backend)

    def start_weight_update(self) -> None:
        """Put the model's layers into loadable form, unless it holds weights that an update may keep.

        An update that broke off is closed first: its half-loaded layers would mix old tensors with new ones.
        """
        if self._updating:
            self.finish_weight_update()
        self.digests, self.adapter, self._record = {}, {}, None
        self._updating = True
        if not self._holds_weights:
            self._make_loadable()

    def _make_loadable(self) -> None:
        self._holds_weights = False
        forget_float32_heads()
        self._layers = detach_adapter_layers(self.model)
        initialize_layerwise_reload(self.model)
        self._record = LoadRecord(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one request."""
        self.receive_weights(self.parse_update_info(update_info))
        # The base class always synchronises the accelerator; only vLLM's CPU runner makes that a no-op.
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReceiveRequest) -> None:
        """Receive every bucket of the request and load it."""
        source = update_info.source
        if isinstance(source, BucketHandle):
            self._load(source.tensors, copy_bucket(source, self.device))
            return
        for bucket, flat in self._receive(*source) if isinstance(source, tuple) else source:
            self._load(bucket, flat)

    def stage(self, manifest: Manifest, bucket_bytes: int) -> list[Bucket]:
        """Receive every bucket of a broadcast without loading it; any thread may call this."""
        return list(self._receive(manifest, bucket_bytes))

    def _receive(self, manifest: Manifest, bucket_bytes: int) -> Iterator[Bucket]:
        for bucket in manifest.buckets(bucket_bytes):
            num_elements = sum(spec.num_elements for spec in bucket)
            flat = torch.empty(num_elements, dtype=bucket[0].torch_dtype, device=self.device)
            assert self._group is not None
            broadcast_from_sender(self._group, flat)
            yield bucket, flat

    def _load(self, bucket: Sequence[TensorSpec], flat: Tensor) -> None:
        """Load a bucket. ``flat`` belongs to this worker: layerwise reload keeps views of it until their
        layer is complete."""
        parts = flat.split([spec.num_elements for spec in bucket])
        tensors = {spec.name: part.view(spec.shape) for spec, part in zip(bucket, parts, strict=True)}
        self.digests.update({name: tensor_digest(tensor) for name, tensor in tensors.items()})
        factors = {name: tensor for name, tensor in tensors.items() if is_adapter(name)}
        self.adapter |= factors
        weights = [(name, tensor) for name, tensor in tensors.items() if name not in factors]
        if not weights:
            return
        if self._layers is None:
            self._make_loadable()
        # vLLM's layerwise reload collects the tensors of all calls, and processes a layer (prepacking,
        # quantisation) when its last tensor has come.
        assert self._record is not None
        self.model.load_weights(by_loaders(self.model, weights))
        self._record.end_bucket(dict(weights))

    def finish_weight_update(self) -> None:
        """Quantise or prepack the layers that are complete."""
        # Reset first: if the call fails, the next update must not finish this one again.
        self._updating = False
        layers, self._layers = self._layers, None
        if layers is None:
            return
        try:
            finalize_layerwise_reload(self.model, self.model_config)
        finally:
            attach_layers(self.model, layers)
        takes_adapters = self.vllm_config.lora_config is not None
        self._holds_weights = takes_adapters and not self.not_loaded

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self._group = None


# vLLM refuses to register a name twice.
if BACKEND_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND_NAME, WeightReceiver)
