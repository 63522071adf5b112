"""Workers that go wrong on request, at the places where real systems did; for tests of the proofs and
guards."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from conversing import tool_conversations
from torch import Tensor

from verl_rc.algorithm.ppo.in_actor import MiniBatchCorrection
from verl_rc.algorithm.ppo.mini_batches import MiniBatch
from verl_rc.config.rollout import MultiTurnConfig, RolloutConfig
from verl_rc.records.batches import TokenBatch, TrainBatch
from verl_rc.records.parts import Part, Sample
from verl_rc.records.ragged import Column, Ragged
from verl_rc.records.tokenize import load_tokenizer
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.sampling import ConversationOptions, GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.tool_environment import ToolCall
from verl_rc.runtime.rollout.vllm import sampler
from verl_rc.runtime.rollout.vllm.adapters import REQUEST
from verl_rc.runtime.rollout.vllm.engine import VllmEngine
from verl_rc.runtime.rollout.vllm.load_record import LoadRecord
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.output import parts_of_output
from verl_rc.runtime.rollout.vllm.sampler import VllmSampler
from verl_rc.runtime.weight_sync.manifest import Manifest, tensor_digest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.workers.micro_batches import ObjectiveTotals
from verl_rc.runtime.workers.policy_worker import PolicyWorker

BAD_ROW = 9
"""Last digit of the numbers of samples whose log-probs are made bad; a canary has fewer rows, so that a
step's own are meant."""
HALF_LOADED = "gate_proj.weight"
"""End of the name of the tensors whose second half stays as it was."""


class FaultyEngine(VllmEngine):
    """An engine with a fault that can be switched on."""

    fault: str | None = None
    cache_resets = 0
    adapter: Mapping[str, Tensor] = {}
    """The last one that it applied."""

    def __init__(self, options: VllmOptions) -> None:
        reset = VllmSampler.reset_prefix_cache

        def reset_unless_stale(of_engine: VllmSampler) -> None:
            if self.fault != "stale_prefix_cache":
                reset(of_engine)
                self.cache_resets += 1

        VllmSampler.reset_prefix_cache = reset_unless_stale
        sampler.parts_of_output = self._parts_of_output
        super().__init__(options)

    def plant(self, fault: str | None) -> None:
        self.fault = fault

    def converse(self, config: MultiTurnConfig | None) -> None:
        """Take every turn for a call of a tool, because an untrained model writes none; None: no tools
        again."""
        options, conversations = None, None
        if config is not None:
            options = ConversationOptions(
                RolloutConfig(multi_turn=config), self._options.model_path, False, {}
            )
            conversations = tool_conversations(
                load_tokenizer(self._options.model_path),
                config,
                parse=lambda text: [ToolCall("calculator", {"expression": f"{len(text)}+1"})],
            )
        self._options = replace(self._options, conversation=options)
        self._loop.call(lambda sampler: setattr(sampler, "_conversations", conversations))

    def count_cache_resets(self) -> int:
        return self.cache_resets

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        transfer = self._loop.call(lambda sampler: sampler.weight_receiver())
        load, held = transfer.model.load_weights, self.__dict__.setdefault("held", {})
        if self.fault == "skipped_sync":
            # The worst kind: everything is received and acknowledged, the version is echoed, and the old
            # weights stay.
            transfer.model.load_weights = lambda tensors: {name for name, _ in tensors}
            try:
                transfer.digests, transfer._record = {}, LoadRecord(transfer.model)
                transfer._layers = {}  # as if the weights were in loadable form, which would drop them
                transfer.update_weights({"source": (manifest, bucket_bytes)})
            finally:
                transfer.model.load_weights, transfer._layers = load, None
            self._loop.call(lambda sampler: sampler._llm.llm_engine.set_weight_version(str(version)))
            self._loop.call(lambda sampler: setattr(sampler, "version", version))
            self._loop.call(lambda sampler: sampler.reset_prefix_cache())
            return [LoadReceipt(transfer.digests, [])]

        if self._options.adapter_rank:
            request = None if self.fault == "no_adapter" else REQUEST
            self._loop.call(lambda sampler: setattr(sampler, "_adapter", request))
        transfer.model.load_weights = lambda tensors: load(self._as_loaded(tensors, held))
        try:
            receipts = super().receive_weights(
                manifest, bucket_bytes, version - (self.fault == "older_version")
            )
        finally:
            transfer.model.load_weights = load
        older, self.adapter = self.adapter, transfer.adapter
        if self.fault == "stale_adapter":
            transfer.adapter = self.adapter = older
            self._loop.call(lambda sampler: sampler._llm.collective_rpc("apply_adapter"))
        return receipts

    def _as_loaded(
        self, tensors: Iterable[tuple[str, Tensor]], held: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if self.fault == "half_loaded_tensor" and name.endswith(HALF_LOADED):
                tensor[len(tensor) // 2 :] = held[name][len(tensor) // 2 :]
            held[name] = tensor.clone()
            yield name, tensor

    def submit(self, samples: Sequence[Request]) -> None:
        super().submit([replace(sample, options=self._options_of(sample.options)) for sample in samples])

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        return super().generate(requests, self._options_of(options))

    def _options_of(self, options: SamplingOptions) -> SamplingOptions:
        factor = 1.5 if self.fault == "other_temperature" else 1.0
        return replace(options, temperature=factor * options.temperature)

    def _parts_of_output(
        self, output: Any, held: tuple[int, int], number: int, columns: Mapping[str, Any]
    ) -> list[Part]:
        bad = number % (BAD_ROW + 1) == BAD_ROW
        if self.fault == "missing_log_prob" and bad:
            output.logprobs = None
        parts = parts_of_output(output, held, number, columns)
        if self.fault == "nan_log_prob" and bad:
            parts[0].log_probs[:] = torch.nan
        return parts


class FaultyPolicyWorker(PolicyWorker):
    """A trainer rank with a fault that can be switched on, and with weights that can be moved and
    compared."""

    fault: str | None = None

    def plant(self, fault: str | None) -> None:
        self.fault = fault
        whole: Sequence[Any] = getattr(self, "whole_manifest", self._sender.manifest).tensors
        self.whole_manifest = Manifest(tuple(whole))
        self._sender.manifest = (
            Manifest(tuple(whole[:-1])) if fault == "one_tensor_not_sent" else self.whole_manifest
        )

    def weight_digests(self) -> list[int]:
        return [
            tensor_digest(parameter.to_local().detach().flatten())
            for parameter in self.model.module.parameters()
        ]

    def move_weights(self, distance: float) -> None:
        """Every trained element by ``distance`` up or down, as a first step of AdamW with this learning rate
        does."""
        generator = torch.Generator().manual_seed(11)
        for parameter in filter(lambda one: one.requires_grad, self.model.module.parameters()):
            local = parameter.to_local().detach()
            local += distance * (2.0 * torch.randint(0, 2, local.shape, generator=generator) - 1.0)

    def compute_log_probs(
        self, tokens: Ragged[TokenBatch], micro_batches: Sequence[Sequence[int]]
    ) -> list[Column]:
        log_probs, *others = super().compute_log_probs(tokens, micro_batches)
        if self.fault == "shifted_log_probs":
            log_probs = np.roll(log_probs, 1)
        if self.fault == "nan_log_probs":
            log_probs = np.full_like(log_probs, np.nan)
        return [log_probs, *others]

    def accumulate(
        self,
        batch: Ragged[TrainBatch],
        share: MiniBatch,
        totals: ObjectiveTotals,
        correction: MiniBatchCorrection,
    ) -> None:
        super().accumulate(batch, share, totals, correction)
        if self.fault == "nan_gradient":
            next(self.model.module.parameters()).grad.to_local().fill_(torch.nan)
