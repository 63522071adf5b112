"""Workers with the faults of ``held_out.py``."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from planted_faults.workers import PlantedEngine, PlantedPolicyWorker
from torch import Tensor

from verl_rc.data.batches import Completions, TokenBatch
from verl_rc.rollout import vllm_sampler
from verl_rc.rollout.sampling import EngineOptions, GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import QueuedSample
from verl_rc.tensor_ops import logprobs
from verl_rc.workers import forward

KEYS = ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn.k_proj.bias")
"""Ends of the names of the tensors whose halves, one for each of the model's two key heads, are exchanged."""
START = 256
"""The id that begins and ends texts in the quickstart's tokenizer."""


class HeldOutEngine(PlantedEngine):
    """An engine with a held-out fault, or with one of the table."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        if "presence_penalty" in self._planted:
            make, penalty = vllm_sampler.sampling_parameters, float(self._planted["presence_penalty"])

            def penalising(*arguments: Any) -> Any:
                parameters = make(*arguments)
                parameters.presence_penalty = penalty
                return parameters

            vllm_sampler.sampling_parameters = penalising

    def submit(self, samples: Sequence[QueuedSample]) -> None:
        """Queue samples of other prompts."""
        super().submit([replace(sample, request=self._with_start(sample.request)) for sample in samples])

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> Completions:
        """Sample for other prompts."""
        return super().generate([self._with_start(request) for request in requests], options)

    def _with_start(self, request: GenerationRequest) -> GenerationRequest:
        if "second_start_token" not in self._planted:
            return request
        return replace(request, prompt_token_ids=[START, *request.prompt_token_ids])

    def _as_loaded(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super()._as_loaded(tensors, version):
            exchanges = "exchanged_key_heads" in self._planted and name.endswith(KEYS)
            yield name, torch.cat(tensor.chunk(2)[::-1]) if exchanges else tensor

    def _misreport(self, completions: Completions) -> None:
        super()._misreport(completions)
        if "stop_token_at_0" in self._planted:
            places = torch.arange(completions.responses.shape[1])
            is_stop = completions.finished[:, None] & (places == completions.response_lengths[:, None] - 1)
            completions.rollout_log_probs = completions.rollout_log_probs.masked_fill(is_stop, 0.0)


class HeldOutPolicyWorker(PlantedPolicyWorker):
    """A trainer rank with a held-out fault, or with one of the table."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if "packed_without_borders" in self._planted:
            pack = forward.packed_inputs
            forward.packed_inputs = lambda ids, lengths, ranks=None: pack(ids, in_pairs(torch.as_tensor(lengths)), ranks)
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
