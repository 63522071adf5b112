"""A vLLM engine in this process: token ids in; token ids, log-probs and weight versions out."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from operator import attrgetter
from typing import Any, Literal

from verl_rc.data.parts import UNKNOWN, Sample, num_tokens
from verl_rc.rollout.engine import Collected, Interrupted, QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import After, Box, StepLoop
from verl_rc.rollout.tools import ToolFailedError
from verl_rc.rollout.vllm import receiver
from verl_rc.rollout.vllm.options import EngineOptions
from verl_rc.rollout.vllm.sampler import VllmSampler
from verl_rc.weight_sync.shared_bucket import BucketHandle
from verl_rc.weight_sync.transfer_group import TransferAddress

MemoryTag = Literal["weights", "kv_cache"]
"""The parts of an engine's memory that sleep and wake by themselves."""


class RolloutEngine:
    """Samples responses and takes weight updates. Lives alone in its process: vLLM owns the process's
    threads.

    Methods may be called from any thread: only the thread of ``StepLoop`` calls vLLM. What an update does to
    running samples is ``EngineOptions.on_update``. Sleep waits until every response requested before has
    ended; later ones wait for it.
    """

    def __init__(self, options: EngineOptions) -> None:
        """Build the engine; weights come with the first update."""
        self._options = options
        self._can_sleep = bool(options.arguments.get("enable_sleep_mode", False))
        self._box: Box = []
        self._on_update = options.on_update
        self._interrupted = Interrupted([])
        """What the last update interrupted."""
        self._paused_at = 0.0
        """When the last update began, ``time.perf_counter`` seconds."""
        self._loop = StepLoop(partial(VllmSampler, options), options.max_concurrent)
        self._loaded: Future[list[dict[str, Any]]] = Future()
        """The receipts of the last ``load_staged``."""
        self._staged: list[receiver.Bucket] = []
        if options.deterministic_steps is not None:
            self._loop.call(lambda _: self._loop.limit(0))

    def describe(self) -> dict[str, Any]:
        """Facts of the running engine: its cache's block size, how it computes fp8 products (None: it has
        none)."""

        def facts(sampler: VllmSampler) -> dict[str, Any]:
            block_size = sampler.llm.llm_engine.vllm_config.cache_config.block_size
            fp8_products = sampler.llm.collective_rpc("fp8_products")[0]
            return {"block_size": block_size, "fp8_products": fp8_products}

        return self._loop.call(facts)

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        """Join the weight-transfer group, this engine's workers from ``first_rank`` on; blocks until every
        member has come."""
        mine = receiver.ReceiverAddress(
            address.host, address.port, address.world_size, first_rank, backend, address.timeout_seconds
        )
        # The next update follows, also where one that is staged waits for samples.
        self._loop.post(
            lambda sampler: sampler.llm.init_weight_transfer_engine({"init_info": asdict(mine)}),
            overtakes=True,
        ).result()

    def receive_weights(
        self, manifest: list[dict[str, Any]], bucket_bytes: int, version: int
    ) -> list[dict[str, Any]]:
        """Receive a broadcast weight update as ``version`` and reset the prefix cache; returns a receipt per
        worker."""
        if self._options.stages_updates:
            self.stage_weights(manifest, bucket_bytes)
            self.load_staged(version)
            return self._loaded.result()
        self.begin_update()
        self._update({"manifest": manifest, "bucket_bytes": bucket_bytes})
        return self.finish_update(version)

    def stage_weights(self, manifest: list[dict[str, Any]], bucket_bytes: int) -> None:
        """Receive a broadcast weight update beside the samples that run, and keep it aside for
        ``load_staged``."""
        receiver_of_worker = self._loop.post(
            lambda sampler: sampler.weight_receiver(), overtakes=True
        ).result()
        # In this thread, while that of the loop goes on stepping.
        self._staged = receiver_of_worker.stage({"manifest": manifest, "bucket_bytes": bucket_bytes})

    def load_staged(self, version: int) -> None:
        """Load what ``stage_weights`` received last as ``version``, as soon as an update may begin. Returns
        at once.

        What is submitted later is sampled with it.
        """
        staged, self._staged = self._staged, []

        def load(sampler: VllmSampler) -> list[dict[str, Any]]:
            self._begin(sampler)
            sampler.llm.update_weights({"update_info": {"staged": staged}})
            return self._finish(sampler, version)

        self._loaded = self._loop.post(load, after=self._update_waits_for, hold="update", release="update")

    def loaded(self) -> list[dict[str, Any]] | None:
        """A receipt per worker of the last ``load_staged``; None: it is still to come."""
        return self._loaded.result() if self._loaded.done() else None

    def device_keys(self) -> list[str]:
        """The device of each worker, named as trainer ranks name theirs."""
        return self._loop.call(lambda sampler: sampler.llm.collective_rpc("weight_sync_device"))

    def begin_update(self) -> None:
        """Make the model loadable; every bucket of the update follows, then ``finish_update``. Sampling
        pauses.

        Running samples are dealt with as ``EngineOptions.on_update`` says; with ``deterministic_steps`` once
        these are made.
        """
        self._loop.call(self._begin, after=self._update_waits_for, hold="update")

    def load_bucket(self, handle: BucketHandle) -> None:
        """Load one lent bucket; its lender may take the memory back when this returns."""
        self._update({"handle": handle})

    def _update(self, update_info: dict[str, Any]) -> None:
        self._loop.call(lambda sampler: sampler.llm.update_weights({"update_info": update_info}))

    def finish_update(self, version: int) -> list[dict[str, Any]]:
        """End the update as ``version`` and reset the prefix cache; returns a receipt per worker."""
        return self._loop.call(lambda sampler: self._finish(sampler, version), release="update")

    def abandon_update(self) -> None:
        """Close an update that broke off. Sampling pauses until another one is finished, because the weights
        are a mixture."""
        self._loop.call(lambda sampler: self._close(sampler, UNKNOWN))

    @property
    def _update_waits_for(self) -> After:
        waits = self._on_update == "finish" or self._options.deterministic_steps is not None
        return "all" if waits else "priority"

    def interrupted(self) -> Interrupted:
        """What the last update did to samples that were submitted."""
        return self._interrupted

    def begin_steps(self) -> None:
        """Make ``EngineOptions.deterministic_steps`` steps with the weights that the engine holds, if that is
        given.

        Without this call submitted samples wait after an update, and after these steps until the next update.
        """
        steps = self._options.deterministic_steps
        if steps is not None:
            self._loop.call(lambda _: self._loop.limit(steps))

    def require(self, numbers: Sequence[int]) -> None:
        """Sample these to their end, beyond ``deterministic_steps`` too."""
        self._loop.call(lambda _: self._loop.require(numbers))

    def activity(self) -> list[tuple[float, float]]:
        """See ``StepLoop.take_activity``."""
        return self._loop.call(lambda _: self._loop.take_activity())

    def sleep(self) -> bool:
        """Free the memory of weights and KV cache, so that a trainer on the same device can use it.

        The weights are lost: ``wake_up(["weights"])``, a whole update and ``wake_up(["kv_cache"])`` must come
        before the next sample. Returns False, having done nothing, for an engine built without
        ``enable_sleep_mode`` (vLLM refuses that argument on a CPU).
        """
        if self._can_sleep:
            # Level 1 would copy the weights to host memory, and the next update replaces them anyway.
            self._loop.call(lambda sampler: sampler.llm.sleep(level=2), after="all", hold="memory")
        return self._can_sleep

    def wake_up(self, tags: Sequence[MemoryTag]) -> bool:
        """Take the memory of ``tags`` again, its contents undefined; False, having done nothing, if it cannot
        sleep."""
        if self._can_sleep:
            last = "memory" if "kv_cache" in tags else ""
            self._loop.call(lambda sampler: sampler.llm.wake_up(list(tags)), release=last)
        return self._can_sleep

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes: vLLM keeps them over a weight update, and they belong to the old weights."""
        self._loop.call(_reset_prefix_cache)

    def submit(self, samples: Sequence[QueuedSample]) -> None:
        """Queue samples and return at once. ``collect`` returns their responses."""
        self._loop.submit(samples, self._box)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Stop sampling these, begun or not; ``collect`` still returns those that have ended."""
        # An update that waits for these must not hold their end back.
        self._loop.post(lambda sampler: self._loop.cancel(sampler, numbers), overtakes=True).result()

    def collect(self, at_least: int = 1, wait_seconds: float | None = None) -> Collected:
        """Submitted samples that have ended, once there are ``at_least`` so many or ``wait_seconds`` are over
        (None: no limit).

        Raises ``ValueError`` naming the request when a sampled token came back without a finite log-prob.
        """
        return _collected(self._loop.take(self._box, at_least, wait_seconds))

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """Sample one response per request, in order, with priority over submitted samples that have not
        begun.

        Raises like ``collect``, and ``ToolFailedError`` when a tool failed.
        """
        box: Box = []
        self._loop.submit(
            [QueuedSample(row, request, options, ahead=True) for row, request in enumerate(requests)], box
        )
        collected = _collected(self._loop.take(box, at_least=len(requests)))
        for why in collected.failures.values():
            raise ToolFailedError(why)
        return sorted(collected.samples, key=attrgetter("number"))

    # in the thread of the loop

    def _begin(self, sampler: VllmSampler) -> None:
        self._paused_at = time.perf_counter()
        if self._options.deterministic_steps is not None:
            self._loop.limit(0)
        cut = self._loop.cut(sampler) if self._on_update == "recompute" else []
        so_far: dict[int, Sample] = dict(self._loop.so_far(sampler))
        again = sum(len(one.request.prompt_token_ids) + num_tokens(so_far[one.number].parts) for one in cut)
        self._interrupted = Interrupted(list(so_far.values()), recomputed_tokens=again)
        sampler.llm.start_weight_update()

    def _finish(self, sampler: VllmSampler, version: int) -> list[dict[str, Any]]:
        self._close(sampler, version)
        receipts: list[dict[str, Any]] = sampler.llm.collective_rpc("weight_sync_receipt")
        self._interrupted = replace(self._interrupted, pause_seconds=time.perf_counter() - self._paused_at)
        return receipts

    def _close(self, sampler: VllmSampler, version: int) -> None:
        sampler.finish_update(version)
        # While the update still holds sampling back: no request may find blocks of the old weights.
        if self._on_update != "keep":
            _reset_prefix_cache(sampler)


def _collected(ended: Box) -> Collected:
    """Raise what came in the place of a sample, but for tools that failed."""
    samples, failures = list[Sample](), dict[int, str]()
    for number, outcome in ended:
        if isinstance(outcome, ToolFailedError):
            failures[number] = str(outcome)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            samples.append(outcome)
    return Collected(samples, failures)


def _reset_prefix_cache(sampler: VllmSampler) -> None:
    # vLLM returns False, and keeps the cache, while a request still holds blocks of it.
    if not sampler.llm.reset_prefix_cache():
        raise RuntimeError(
            "the engine's prefix cache must be empty after a weight update, but vLLM refused to reset it."
        )
