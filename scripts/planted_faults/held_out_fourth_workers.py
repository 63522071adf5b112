"""Workers with the faults of ``held_out_fourth.py``."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from planted_faults.faults import planted
from planted_faults.held_out_hooks import exchanged, seed_of, without_stop, without_turn_ends
from planted_faults.held_out_workers import HeldOutEngine, HeldOutPolicyWorker
from torch import Tensor

from verl_rc.data.parts import Part, Sample
from verl_rc.rollout.engine import Collected, QueuedSample
from verl_rc.rollout.vllm import sampler
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.tensor_ops import logprobs

SEVEN = 22
"""Id of the digit in the quickstart's tokenizer."""


class FourthEngine(HeldOutEngine):
    """An engine with a fault of the fourth set, or with one of the others."""

    def __init__(self, options: VllmOptions) -> None:
        faults = planted()
        self._first_head: Tensor | None = None
        if "rope_theta" in faults:
            rope = {"rope_type": "default", "rope_theta": float(faults["rope_theta"])}
            options.arguments["hf_overrides"] = {"rope_parameters": rope}
        if "attention_window" in faults:
            _attend_to(int(faults["attention_window"]))
        if "lost_turn_ends" in faults:
            sampler.context = lambda prompt, parts: [*prompt, *without_turn_ends(parts)]
        super().__init__(options)
        if "logit_bias" in faults:
            sampler.sampling_parameters = _biased(sampler.sampling_parameters, float(faults["logit_bias"]))

    def submit(self, samples: Sequence[QueuedSample]) -> None:
        """Queue samples, those of a prompt perhaps with one seed."""
        if "shared_seed" in self._planted:
            requests = [
                replace(sample.request, seed=seed_of(sample.request.prompt_token_ids)) for sample in samples
            ]
            samples = [
                replace(sample, request=request) for sample, request in zip(samples, requests, strict=True)
            ]
        super().submit(samples)

    def collect(self, at_least: int = 1, wait_seconds: float | None = None) -> Collected:
        """Report some samples under the numbers of others."""
        collected = super().collect(at_least, wait_seconds)
        if "foreign_samples" not in self._planted:
            return collected
        return replace(collected, samples=exchanged(collected.samples, self._chance))

    def _as_loaded(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super()._as_loaded(tensors, version):
            if "stale_head" in self._planted and name == "lm_head.weight":
                self._first_head = tensor.clone() if self._first_head is None else self._first_head
                yield name, self._first_head.clone()
            else:
                yield name, tensor

    def _misreported(self, sample: Sample) -> Sample:
        sample = super()._misreported(sample)
        if "log_prob_floor" in self._planted:
            floor = float(self._planted["log_prob_floor"])
            parts = [
                replace(part, log_probs=part.log_probs.clamp_min(floor)) if isinstance(part, Part) else part
                for part in sample.parts
            ]
            sample = replace(sample, parts=parts)
        if "stripped_stop" in self._planted:
            sample = without_stop(sample)
        return sample


class FourthPolicyWorker(HeldOutPolicyWorker):
    """A trainer rank with a fault of the fourth set, or with one of the others."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if "logit_softcap" in self._planted:
            cap, scale = float(self._planted["logit_softcap"]), logprobs._scaled
            logprobs._scaled = lambda logits, temperature: scale(
                cap * torch.tanh(logits.float() / cap), temperature
            )


def _attend_to(window: int) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    build = CPUAttentionBackendImpl.__init__

    def build_with_window(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        self.sliding_window = window

    CPUAttentionBackendImpl.__init__ = build_with_window


def _biased(make: Callable[..., Any], bias: float) -> Callable[..., Any]:
    def make_biased(*arguments: Any) -> Any:
        parameters = make(*arguments)
        parameters.logit_bias = {SEVEN: bias}
        return parameters

    return make_biased
