"""A vLLM engine in this process: token ids in; token ids, log-probs and weight versions out."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from operator import attrgetter
from pathlib import Path

from verl_rc.records.parts import UNKNOWN, Sample
from verl_rc.runtime.rollout.engine import (
    Collected,
    Engine,
    EngineFacts,
    Interrupted,
    MemoryTag,
    Request,
)
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.open_request import Box
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.rollout.step_loop import After, StepLoop
from verl_rc.runtime.rollout.vllm import receiver
from verl_rc.runtime.rollout.vllm.options import VllmOptions
from verl_rc.runtime.rollout.vllm.sampler import VllmSampler
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress


class VllmEngine(Engine):
    """Samples responses and takes weight updates. Lives alone in its process: vLLM owns the process's
    threads.

    Methods may be called from any thread: only the thread of ``StepLoop`` calls vLLM.
    ``VllmOptions.on_update`` says what an update does to running samples. Sleep waits until every response
    requested before has ended; later ones wait for it.
    """

    def __init__(self, options: VllmOptions) -> None:
        """Build the engine; weights come with the first update."""
        self._options = options
        self._can_sleep: bool = options.arguments.get("enable_sleep_mode", False)
        self._box: Box = []
        self._interrupted = Interrupted([])
        """Samples that the last update interrupted."""
        self._update_start = 0.0
        """Start of the last update, ``time.perf_counter`` seconds."""
        self._loop = StepLoop(
            partial(VllmSampler, options), options.max_concurrent, in_lockstep=options.deterministic
        )
        self._loaded: Future[list[LoadReceipt]] = Future()
        """The receipts of the last ``load_staged``."""
        self._staged: list[receiver.Bucket] = []
        if options.deterministic_steps is not None:
            self._loop.call(lambda _: self._loop.limit(0))

    def facts(self) -> EngineFacts:
        """See ``Engine``."""
        return self._loop.call(lambda sampler: sampler.facts())

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        """See ``Engine``."""
        receiver_address = receiver.ReceiverAddress(address, first_rank, backend)
        # Before a staged update that waits for samples: the next update needs the group.
        self._loop.post(lambda sampler: sampler.join_transfer(receiver_address), overtakes=True).result()

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        """See ``Engine``. The prefix cache is reset, too."""
        if self._options.stages_updates:
            self.stage_weights(manifest, bucket_bytes)
            self.load_staged(version)
            return self._loaded.result()
        self.begin_update()
        self._loop.call(lambda sampler: sampler.load((manifest, bucket_bytes)))
        return self.finish_update(version)

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> None:
        """See ``Engine``. It is received in the calling thread, while the loop's thread makes steps."""
        weight_receiver = self._loop.post(lambda sampler: sampler.weight_receiver(), overtakes=True).result()
        self._staged = weight_receiver.stage(manifest, bucket_bytes)

    def load_staged(self, version: int) -> None:
        """See ``Engine``. Samples that are submitted later are sampled with these weights."""
        staged, self._staged = self._staged, []

        def load(sampler: VllmSampler) -> list[LoadReceipt]:
            self._begin(sampler)
            sampler.load(staged)
            return self._finish(sampler, version)

        self._loaded = self._loop.post(load, after=self._update_waits_for, hold="update", release="update")

    def loaded(self) -> list[LoadReceipt] | None:
        """See ``Engine``."""
        return self._loaded.result() if self._loaded.done() else None

    def device_keys(self) -> list[str]:
        """See ``Engine``."""
        return self._loop.call(lambda sampler: sampler.device_keys())

    def begin_update(self) -> None:
        """See ``Engine``. ``VllmOptions.on_update`` decides about running samples; with
        ``deterministic_steps`` the update begins after these steps."""
        self._loop.call(self._begin, after=self._update_waits_for, hold="update")

    def load_bucket(self, handle: BucketHandle) -> None:
        """See ``Engine``."""
        self._loop.call(lambda sampler: sampler.load(handle))

    def finish_update(self, version: int) -> list[LoadReceipt]:
        """See ``Engine``. The prefix cache is reset, too."""
        return self._loop.call(lambda sampler: self._finish(sampler, version), release="update")

    def abandon_update(self) -> None:
        """See ``Engine``: the weights are a mixture of two versions."""
        self._loop.call(lambda sampler: sampler.finish_update(UNKNOWN))

    @property
    def _update_waits_for(self) -> After:
        return "all" if self._options.on_update == "finish" or self._options.deterministic else "priority"

    def interrupted(self) -> Interrupted:
        """See ``Engine``."""
        return self._interrupted

    def resume(self) -> None:
        """See ``Engine``. A deterministic engine makes ``VllmOptions.deterministic_steps`` steps; submitted
        samples then wait for the next update."""
        steps = self._options.deterministic_steps
        if steps is not None:
            self._loop.call(lambda _: self._loop.limit(steps))

    def finish(self, numbers: Sequence[int]) -> None:
        """See ``Engine``. ``deterministic_steps`` does not limit these samples."""
        self._loop.call(lambda _: self._loop.require(numbers))

    def activity(self) -> list[tuple[float, float]]:
        """See ``StepLoop.take_activity``."""
        return self._loop.call(lambda _: self._loop.take_activity())

    def switch_trace(self, path: Path | None) -> None:
        """See ``Engine``."""
        self._loop.call(lambda sampler: sampler.switch_trace(path))

    def sleep(self) -> bool:
        """See ``Engine``. An engine without ``enable_sleep_mode``, which vLLM refuses on a CPU, cannot
        sleep."""
        if self._can_sleep:
            self._loop.call(lambda sampler: sampler.sleep(), after="all", hold="memory")
        return self._can_sleep

    def wake_up(self, tags: Sequence[MemoryTag]) -> bool:
        """See ``Engine``."""
        if self._can_sleep:
            release = "memory" if "kv_cache" in tags else ""
            self._loop.call(lambda sampler: sampler.wake_up(tags), release=release)
        return self._can_sleep

    def submit(self, requests: Sequence[Request]) -> None:
        """See ``Engine``."""
        self._loop.submit(requests, self._box)

    def cancel(self, numbers: Sequence[int]) -> None:
        """See ``Engine``."""
        # Before an update that waits for these samples.
        self._loop.post(lambda sampler: self._loop.cancel(sampler, numbers), overtakes=True).result()

    def collect(
        self, at_least: int = 1, wait_seconds: float | None = None, linger_seconds: float | None = None
    ) -> Collected:
        """See ``Engine``. Raises ``ValueError`` naming the request when a sampled token came back without a
        finite log-prob."""
        return _collected(self._loop.take(self._box, at_least, wait_seconds, linger_seconds))

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """See ``Engine``. Raises ``ValueError`` like ``collect``."""
        box: Box = []
        samples = [Request(row, request, options, has_priority=True) for row, request in enumerate(requests)]
        self._loop.submit(samples, box)
        collected = _collected(self._loop.take(box, at_least=len(requests)))
        for message in collected.failures.values():
            raise EpisodeFailedError(message)
        return sorted(collected.samples, key=attrgetter("number"))

    # in the loop's thread

    def _begin(self, sampler: VllmSampler) -> None:
        self._update_start = time.perf_counter()
        if self._options.deterministic_steps is not None:
            self._loop.limit(0)
        if self._options.on_update == "recompute":
            self._loop.cut(sampler)
        self._interrupted = Interrupted(self._loop.so_far(sampler))
        sampler.begin_update()

    def _finish(self, sampler: VllmSampler, version: int) -> list[LoadReceipt]:
        sampler.finish_update(version)
        receipts = sampler.receipts()
        self._interrupted = replace(self._interrupted, pause_seconds=time.perf_counter() - self._update_start)
        return receipts


def _collected(ended: Box) -> Collected:
    """Samples and failures of a box. Raises any other exception that came in the place of a sample."""
    samples, failures = list[Sample](), dict[int, str]()
    for number, outcome in ended:
        if isinstance(outcome, EpisodeFailedError):
            failures[number] = str(outcome)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            samples.append(outcome)
    return Collected(samples, failures)
