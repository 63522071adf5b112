"""Workers that go wrong on request, at the places where real systems did; for tests of the sync proofs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_rc.data.batches import Completions
from verl_rc.rollout.engine import RolloutEngine
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.sender import SendReceipt
from verl_rc.workers.policy_worker import PolicyWorker


class FaultyEngine(RolloutEngine):
    """An engine with a fault that can be switched on."""

    fault: str | None = None

    def plant(self, fault: str | None) -> None:
        self.fault = fault

    def receive_weights(self, manifest: list[dict[str, Any]], bucket_bytes: int, version: int) -> list[dict[str, Any]]:
        if self.fault != "skipped_sync":
            return super().receive_weights(manifest, bucket_bytes, version)
        # The worst kind: everything is received and acknowledged, the version is echoed, and the old weights stay.
        transfer = self._llm.llm_engine.model_executor.driver_worker.worker.weight_transfer_engine
        load, transfer.model.load_weights = transfer.model.load_weights, lambda tensors: {name for name, _ in tensors}
        try:
            transfer.digests, transfer.loaded = {}, set(transfer.expected)
            transfer.update_weights({"manifest": manifest, "bucket_bytes": bucket_bytes})
        finally:
            transfer.model.load_weights = load
        self._llm.llm_engine.set_weight_version(str(version))
        self.reset_prefix_cache()
        return [{"digests": transfer.digests, "not_loaded": []}]

    def reset_prefix_cache(self) -> None:
        if self.fault != "stale_prefix_cache":
            super().reset_prefix_cache()

    def generate(self, requests: list[GenerationRequest], options: SamplingOptions) -> Completions:
        if self.fault == "other_temperature":
            options = replace(options, temperature=1.5 * options.temperature)
        return super().generate(requests, options)


class FaultyPolicyWorker(PolicyWorker):
    """A trainer rank with a fault that can be switched on."""

    def plant(self, fault: str | None) -> None:
        whole: Sequence[Any] = getattr(self, "whole_manifest", self._sender.manifest).tensors
        self.whole_manifest = Manifest(tuple(whole))
        self._sender.manifest = Manifest(tuple(whole[:-1])) if fault == "one_tensor_not_sent" else self.whole_manifest

    def send_weights(self) -> SendReceipt:
        return super().send_weights()
