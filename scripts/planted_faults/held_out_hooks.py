"""What faults change, each by itself: it needs no vLLM, so that unit tests can run it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from verl_rc.config.models import ModelConfig
from verl_rc.data.parts import Answer, Part, Sample
from verl_rc.rollout.sampling import GenerationRequest, request_seed
from verl_rc.workers.lora import MergedWeights

SAMPLING = ("presence_penalty", "min_p", "repetition_penalty")
"""Sampling parameters of the engine that the trainer does not have; each is planted with its value."""
START = 256
"""The id that begins and ends texts in the quickstart's tokenizer."""
PREFIXES: Mapping[str, tuple[int, ...]] = {
    "second_start_token": (START,),
    "system_prompt": (50, 78, 81, 83, 13),
}
"""Ids that the engine sees before a prompt, by fault; the system prompt is "Sort." in the quickstart's
tokenizer."""
LINEAR = "_proj.weight"
"""End of the names of the weights of all linear layers but the output."""
_LARGEST_INT8 = 127
FOREIGN = 1 / 16
"""Share of samples that change places with another one."""


def other_parameters(make: Callable[..., Any], planted: Mapping[str, str]) -> Callable[..., Any]:
    """What makes sampling parameters, with those of ``SAMPLING`` set that are planted."""
    others = {name: float(planted[name]) for name in SAMPLING if name in planted}

    def make_others(*arguments: Any) -> Any:
        parameters = make(*arguments)
        for name, value in others.items():
            setattr(parameters, name, value)
        return parameters

    return make_others


def with_prefix(request: GenerationRequest, planted: Mapping[str, str]) -> GenerationRequest:
    """The request with other ids before its prompt."""
    before = [token for fault, tokens in PREFIXES.items() if fault in planted for token in tokens]
    return replace(request, prompt_token_ids=[*before, *request.prompt_token_ids])


def misses_update(planted: Mapping[str, str], first_rank: int, version: int) -> bool:
    """Whether an engine, whose first worker has ``first_rank`` in the transfer group, keeps its weights in
    this update."""
    return ("skip_every_second_sync" in planted and version % 2 == 1) or (
        "stale_second_engine" in planted and first_rank > 1
    )


def in_fp8(values: Tensor) -> Tensor:
    """``values`` as a cache in fp8 (e4m3, scale 1) gives them back, in their own dtype; those beyond its
    range are cut."""
    largest = torch.finfo(torch.float8_e4m3fn).max
    return values.clamp(-largest, largest).to(torch.float8_e4m3fn).to(values.dtype)


def in_int8(weight: Tensor) -> Tensor:
    """``weight`` ``[O, I]`` rounded to 255 equidistant values per output channel, the largest of which is its
    largest size."""
    step = weight.float().abs().amax(dim=1, keepdim=True).clamp_min(1e-12) / _LARGEST_INT8
    return (torch.round(weight / step) * step).to(weight.dtype)


def without_adapters(model: nn.Module, config: ModelConfig) -> MergedWeights:
    """The weights of an adapted model as if its adapters were not there."""
    return MergedWeights(model, config.model_copy(update={"lora_alpha": 0}))


def seed_of(prompt: Sequence[int]) -> int:
    """One seed for every request with this prompt."""
    return request_seed({str(place): token for place, token in enumerate(prompt)})


def exchanged(samples: Sequence[Sample], chance: torch.Generator) -> list[Sample]:
    """The samples; some have changed responses with the sample half a list away."""
    others, half = list(samples), len(samples) // 2
    for place in (torch.rand(half, generator=chance) < FOREIGN).nonzero()[:, 0].tolist():
        one, other = samples[place], samples[place + half]
        others[place] = replace(other, number=one.number)
        others[place + half] = replace(one, number=other.number)
    return others


def without_stop(sample: Sample) -> Sample:
    """The sample without the stop token that ended it, where something is left."""
    last = sample.parts[-1]
    if not sample.finished or not isinstance(last, Part) or len(last.token_ids) < 2:
        return sample
    cut = replace(last, token_ids=last.token_ids[:-1], log_probs=last.log_probs[:-1])
    return replace(sample, parts=[*sample.parts[:-1], cut])


def without_turn_ends(parts: Sequence[Part | Answer]) -> list[int]:
    """The tokens of a response without the EOS of its turns."""
    return [
        token
        for part in parts
        for token in part.token_ids.tolist()
        if isinstance(part, Answer) or token != START
    ]
