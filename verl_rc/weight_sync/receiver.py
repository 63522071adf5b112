"""The engine's end of a weight update, as a vLLM weight-transfer backend. Importing this module registers it.

vLLM's layerwise reload is the only way in that works everywhere: on a CPU its weights are prepacked after loading
and the parameters emptied, and a quantised engine has to quantise anew.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from verl_rc.weight_sync.manifest import Manifest, tensor_digest
from verl_rc.weight_sync.transfer_group import Group, TransferAddress, broadcast_from_sender, join_transfer_group

BACKEND_NAME = "verl_rc_process_group"


@dataclass
class ReceiverAddress(WeightTransferInitInfo):
    """How this engine's workers join the transfer group."""

    host: str = ""
    port: int = 0
    world_size: int = 0
    first_rank: int = 1
    """Rank of this engine's first worker in the transfer group; its tensor-parallel workers follow."""
    process_group_backend: str = "gloo"
    timeout_seconds: float = 120.0


@dataclass
class ReceiveOrder(WeightTransferUpdateInfo):
    """One whole update to receive."""

    manifest: list[dict[str, Any]] = field(default_factory=list)
    bucket_bytes: int = 1 << 30


class ProcessGroupReceiver(WeightTransferEngine[ReceiverAddress, ReceiveOrder]):
    """Receives broadcast buckets, digests each tensor, and loads it through vLLM's layerwise reload."""

    init_info_cls = ReceiverAddress
    update_info_cls = ReceiveOrder

    def init_transfer_engine(self, init_info: ReceiverAddress) -> None:
        """Join the transfer group."""
        rank = init_info.first_rank + self.vllm_config.parallel_config.rank
        address = TransferAddress(init_info.host, init_info.port, init_info.world_size, init_info.timeout_seconds)
        self._group: Group = join_transfer_group(address, rank, init_info.process_group_backend)
        self.digests: dict[str, int] = {}
        self.loaded: set[str] = set()
        # Scales are derived from weights by online quantisation; no tensor of the update fills them.
        self.expected = {name for name, _ in self.model.named_parameters() if not name.endswith("_scale")}

    def start_weight_update(self) -> None:
        """Put the model's layers back into loadable form."""
        self.digests, self.loaded = {}, set()
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one order. (The base class synchronises an accelerator, which a CPU does not have.)"""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReceiveOrder) -> None:
        """Receive every bucket of the manifest and load it.

        A fresh buffer for each bucket: layerwise reload keeps views of the tensors until their layer is complete.
        """
        manifest = Manifest.from_plain(update_info.manifest)
        for bucket in manifest.buckets(update_info.bucket_bytes):
            sizes = [spec.num_elements for spec in bucket]
            flat = torch.empty(sum(sizes), dtype=bucket[0].torch_dtype, device=self.device)
            broadcast_from_sender(self._group, flat)
            parts = flat.split(sizes)
            self.digests.update({spec.name: tensor_digest(part) for spec, part in zip(bucket, parts, strict=True)})
            loaded = self.model.load_weights(
                (spec.name, part.view(spec.shape)) for spec, part in zip(bucket, parts, strict=True)
            )
            self.loaded |= set(loaded or ())

    def finish_weight_update(self) -> None:
        """Quantise or prepack the layers that are complete."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Leave the transfer group."""
        self._group = None


class ReceiptExtension:
    """Worker extension: vLLM imports this module in every worker process, which registers the backend there."""

    weight_transfer_engine: Any

    def weight_sync_receipt(self) -> dict[str, Any]:
        """Digests of what this worker received, and the parameters of its model that no tensor filled."""
        engine = self.weight_transfer_engine
        return {"digests": engine.digests, "not_loaded": sorted(engine.expected - engine.loaded)}


if BACKEND_NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND_NAME, ProcessGroupReceiver)
