"""Workers with the faults of ``held_out.py``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from planted_faults.faults import planted
from planted_faults.held_out_hooks import (
    LINEAR,
    in_int8,
    misses_update,
    other_parameters,
    with_prefix,
    without_adapters,
)
from planted_faults.workers import PlantedEngine, PlantedPolicyWorker
from torch import Tensor

from verl_rc.data.batches import TokenBatch
from verl_rc.data.parts import Part, Sample
from verl_rc.rollout.engine import QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.vllm import sampler
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.tensor_ops import logprobs
from verl_rc.weight_sync.transfer_group import TransferAddress
from verl_rc.workers import forward, lora

KEYS = ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.bias")
"""Ends of the names of the tensors whose halves, one for each of the model's two key heads, are exchanged."""


class HeldOutEngine(PlantedEngine):
    """An engine with a held-out fault, or with one of the table."""

    def __init__(self, options: VllmOptions) -> None:
        super().__init__(options)
        self._first_rank = 1
        sampler.sampling_parameters = other_parameters(sampler.sampling_parameters, self._planted)

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        """Join, and remember which of the engines this is."""
        self._first_rank = first_rank
        super().join_transfer(address, first_rank, backend)

    def submit(self, samples: Sequence[QueuedSample]) -> None:
        """Queue samples of other prompts."""
        super().submit(
            [replace(sample, request=with_prefix(sample.request, self._planted)) for sample in samples]
        )

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """Sample for other prompts."""
        return super().generate([with_prefix(request, self._planted) for request in requests], options)

    def _skips(self, version: int) -> bool:
        return super()._skips(version) or misses_update(self._planted, self._first_rank, version)

    def _as_loaded(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super()._as_loaded(tensors, version):
            loaded = tensor
            if "exchanged_key_heads" in self._planted and name.endswith(KEYS):
                loaded = torch.cat(tensor.chunk(2)[::-1])
            if "int8_weights" in self._planted and name.endswith(LINEAR):
                loaded = in_int8(tensor)
            yield name, loaded

    def _misreported(self, sample: Sample) -> Sample:
        sample = super()._misreported(sample)
        last = sample.parts[-1]
        if "stop_token_at_0" in self._planted and sample.finished and isinstance(last, Part):
            log_probs = last.log_probs.clone()
            log_probs[-1] = 0.0
            sample = replace(sample, parts=[*sample.parts[:-1], replace(last, log_probs=log_probs)])
        return sample


class HeldOutPolicyWorker(PlantedPolicyWorker):
    """A trainer rank with a held-out fault, or with one of the table."""

    def __init__(self, **arguments: Any) -> None:
        if "adapters_not_sent" in planted():
            lora.MergedWeights = without_adapters
        super().__init__(**arguments)
        if "packed_without_borders" in self._planted:
            pack = forward.packed_inputs
            forward.packed_inputs = lambda ids, lengths, ranks=None: pack(
                ids, in_pairs(torch.as_tensor(lengths)), ranks
            )
        if "bf16_logits" in self._planted:
            scale = logprobs._scaled
            logprobs._scaled = lambda logits, temperature: scale(logits.bfloat16(), temperature)

    def compute_log_probs(self, tokens: TokenBatch, micro_batches: Sequence[Sequence[int]]) -> list[Tensor]:
        """Score, and give the last quarter of the rows back in another order."""
        log_probs, *others = super().compute_log_probs(tokens, micro_batches)
        if "exchanged_rows" in self._planted:
            start = len(log_probs) - len(log_probs) // 4
            log_probs = torch.cat([log_probs[:start], log_probs[start:].roll(1, dims=0)])
        return [log_probs, *others]


def in_pairs(lengths: Tensor) -> Tensor:
    """``lengths`` (int64 ``[S]``) with every two added up, the last alone where S is odd."""
    return torch.stack([pair.sum() for pair in lengths.split(2)])
