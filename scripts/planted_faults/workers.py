"""Workers that go wrong for a whole run, as the environment variable ``PLANTED_FAULT`` says."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from planted_faults.faults import planted
from planted_faults.held_out_hooks import in_fp8
from torch import Tensor

from verl_rc.data.batches import TokenBatch, TokenScores, TrainBatch
from verl_rc.data.parts import Part, Sample
from verl_rc.rollout.engine import Collected, QueuedSample
from verl_rc.rollout.sampling import SamplingOptions
from verl_rc.rollout.vllm import sampler
from verl_rc.rollout.vllm.engine import VllmEngine
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import LoadReceipt
from verl_rc.workers.policy_worker import PolicyWorker

SKIPPED_VERSION = 8
"""The publication that an engine does not load, where one is skipped."""
HALF_LOADED = "gate_proj.weight"
"""End of the name of the tensors whose second half stays as it was."""
FIRST_DIGIT = 15
"""Id of the digit 0 in the quickstart's tokenizer; a changed token becomes a 1, or a 2."""
LONGEST_PROMPT, PADDING = 20, 257
"""Width of padded prompts, and the id that fills it."""
CHANGED, NAN = 2e-3, 1e-3
"""Shares of tokens."""
FEWEST_TOKENS = 11
"""Of a response whose stop token is banned: one more than a right answer has."""


class PlantedEngine(VllmEngine):
    """An engine that samples, loads or reports what it should not."""

    def __init__(self, options: VllmOptions) -> None:
        self._planted, self._held = planted(), dict[str, Tensor]()
        self._first, self._holds_first = dict[str, Tensor](), False
        self._chance = torch.Generator().manual_seed(7)
        if "banned_stop" in self._planted:
            make = sampler.sampling_parameters

            def banning(*arguments: Any) -> Any:
                parameters = make(*arguments)
                parameters.min_tokens = min(FEWEST_TOKENS, parameters.max_tokens)
                return parameters

            sampler.sampling_parameters = banning
        if "fp8_cache" in self._planted:
            _round_cache()
        super().__init__(options)
        if "report_raw" in self._planted:
            self._loop.call(_report_raw)
        if "router_noise" in self._planted:
            self._loop.call(partial(_disturb_routers, size=float(self._planted["router_noise"])))

    def submit(self, samples: Sequence[QueuedSample]) -> None:
        """Queue samples with other options; a frozen engine samples from its first weights, and validates the
        newest."""
        if "frozen" in self._planted:
            self._hold(first=any(sample.options.temperature > 0 for sample in samples))
        super().submit([replace(sample, options=self._other(sample.options)) for sample in samples])

    def _hold(self, *, first: bool) -> None:
        if first == self._holds_first:
            return

        def load(sampler: Any) -> None:
            transfer = sampler.weight_receiver()
            transfer.start_weight_update()
            transfer.model.load_weights((self._first if first else self._held).items())
            transfer.finish_weight_update()

        self._loop.call(load)
        self._loop.call(lambda sampler: sampler.reset_prefix_cache())
        self._holds_first = first

    def generate(self, requests: Any, options: SamplingOptions) -> list[Sample]:
        """Sample with other options."""
        samples = super().generate(requests, self._other(options))
        return [self._misreported(sample) for sample in samples]

    def collect(self, at_least: int = 1, wait_seconds: float | None = None) -> Collected:
        """Report other numbers."""
        collected = super().collect(at_least, wait_seconds)
        return replace(collected, samples=[self._misreported(sample) for sample in collected.samples])

    def _other(self, options: SamplingOptions) -> SamplingOptions:
        factor, top_p = (
            float(self._planted.get("temperature", 1.0)),
            float(self._planted.get("top_p", options.top_p)),
        )
        return replace(options, temperature=factor * options.temperature, top_p=top_p)

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        """Acknowledge an update that may not be loaded, or by half."""
        if self._options.stages_updates:
            return super().receive_weights(manifest, bucket_bytes, version)
        transfer = self._loop.call(lambda sampler: sampler.weight_receiver())
        load = transfer.model.load_weights
        transfer.model.load_weights = lambda tensors: load(self._as_loaded(tensors, version))
        try:
            return super().receive_weights(manifest, bucket_bytes, version)
        finally:
            transfer.model.load_weights = load
            self._first, self._holds_first = self._first or dict(self._held), False

    def _skips(self, version: int) -> bool:
        return "skip_every_sync" in self._planted or (
            "skip_one_sync" in self._planted and version == SKIPPED_VERSION
        )

    def _as_loaded(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> Iterator[tuple[str, Tensor]]:
        skips = self._skips(version)
        for name, tensor in tensors:
            loaded = tensor.clone()
            if skips and name in self._held:
                loaded = self._held[name].clone()
            elif "half_a_tensor" in self._planted and name.endswith(HALF_LOADED) and name in self._held:
                loaded[len(loaded) // 2 :] = self._held[name][len(loaded) // 2 :]
            self._held[name] = loaded.clone()
            yield name, loaded

    def _misreported(self, sample: Sample) -> Sample:
        """The sample with other numbers in the policy's parts; answers stay as they are."""
        parts = [part for part in sample.parts if isinstance(part, Part)]
        log_probs = torch.cat([part.log_probs for part in parts])
        token_ids = torch.cat([part.token_ids for part in parts])
        if "shifted_log_probs" in self._planted:
            log_probs = log_probs.roll(1)
            log_probs[0] = 0.0
        if "rounded_log_probs" in self._planted:
            log_probs = log_probs.bfloat16().float()
        if "changed_tokens" in self._planted:
            struck = torch.rand(token_ids.shape, generator=self._chance) < CHANGED
            neighbours = torch.where(token_ids == FIRST_DIGIT + 1, FIRST_DIGIT + 2, FIRST_DIGIT + 1)
            token_ids = torch.where(struck, neighbours, token_ids).to(torch.int32)
        others = iter(_as_long_as(parts, token_ids, log_probs))
        return replace(
            sample, parts=[next(others) if isinstance(part, Part) else part for part in sample.parts]
        )


def _as_long_as(parts: Sequence[Part], token_ids: Tensor, log_probs: Tensor) -> list[Part]:
    """The parts with other tokens and log-probs."""
    lengths = [len(part.token_ids) for part in parts]
    pieces = zip(token_ids.split(lengths), log_probs.split(lengths), parts, strict=True)
    return [replace(part, token_ids=tokens, log_probs=numbers) for tokens, numbers, part in pieces]


def _round_cache() -> None:
    # vLLM has attention over an fp8 cache on CPUs with AVX-512 or AMX alone. There it rounds toward zero, and
    # GPUs round to the nearest number. It writes here before it reads, prompts included.
    from vllm.v1.attention.backends import cpu_attn

    write = cpu_attn.ops.cpu_attn_reshape_and_cache
    cpu_attn.ops.cpu_attn_reshape_and_cache = lambda key, value, *rest, **named: write(
        in_fp8(key), in_fp8(value), *rest, **named
    )


def _disturb_routers(sampler: Any, size: float) -> None:
    """Let routers choose experts by logits with normal noise of this standard deviation."""
    chance = torch.Generator().manual_seed(7)
    for module in sampler.weight_receiver().model.modules():
        if (router := getattr(module, "router", None)) is None:
            continue
        route = router._compute_routing

        def disturbed(states: Tensor, logits: Tensor, *others: Any, route: Any = route, **named: Any) -> Any:
            noise = size * torch.randn(logits.shape, generator=chance)
            return route(states, logits.float() + noise, *others, **named)

        router._compute_routing = disturbed


def _report_raw(sampler: Any) -> None:
    runner_sampler = sampler._llm.llm_engine.model_executor.driver_worker.worker.model_runner.sampler
    # The part that filters returns log-probs of its own otherwise, which win.
    runner_sampler.logprobs_mode = runner_sampler.topk_topp_sampler.logprobs_mode = "raw_logprobs"


class PlantedPolicyWorker(PolicyWorker):
    """A trainer rank that scores what it should not."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._planted, self._chance = planted(), torch.Generator().manual_seed(7)
        if "dropout" in self._planted:
            for module in self.model.module.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.1

    def compute_log_probs(self, tokens: TokenBatch, micro_batches: Sequence[Sequence[int]]) -> list[Tensor]:
        """Score other inputs, or with noise."""
        log_probs, *others = super().compute_log_probs(self._other(tokens), micro_batches)
        if "nan_log_probs" in self._planted:
            struck = torch.rand(log_probs.shape, generator=self._chance) < NAN
            log_probs = log_probs.masked_fill(struck, torch.nan)
        return [log_probs, *others]

    def _scores(self, tokens: TokenBatch) -> list[Tensor]:
        self.model.module.train("dropout" in self._planted)
        return super()._scores(tokens)

    def score(self, part: TrainBatch, with_sum_pi_squared: bool = False) -> TokenScores:
        """Current log-probs of other inputs."""
        changed = part.clone()
        changed.tokens = self._other(part.tokens)
        return super().score(changed, with_sum_pi_squared)

    def _other(self, tokens: TokenBatch) -> TokenBatch:
        other = tokens.clone()
        if "missing_prompt_token" in self._planted:
            other.prompt_lengths = (tokens.prompt_lengths - 1).clamp_min(1)
        if "attended_padding" in self._planted:
            missing = LONGEST_PROMPT - tokens.prompts.shape[1]  # all prompts of the task have one length
            other.prompts = torch.nn.functional.pad(tokens.prompts, (missing, 0), value=PADDING)
            other.prompt_lengths = torch.full_like(tokens.prompt_lengths, LONGEST_PROMPT)
        return other
