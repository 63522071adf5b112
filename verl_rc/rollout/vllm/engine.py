"""A vLLM engine in this process: token ids in; token ids, log-probs and weight versions out."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from operator import attrgetter

from verl_rc.data.parts import UNKNOWN, Sample, num_tokens
from verl_rc.rollout.engine import Collected, Engine, EngineFacts, Interrupted, MemoryTag, QueuedSample
from verl_rc.rollout.environment import EpisodeFailedError
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import After, Box, StepLoop
from verl_rc.rollout.vllm import receiver
from verl_rc.rollout.vllm.options import VllmOptions
from verl_rc.rollout.vllm.sampler import VllmSampler
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.proof import LoadReceipt
from verl_rc.weight_sync.shared_bucket import BucketHandle
from verl_rc.weight_sync.transfer_group import TransferAddress


class VllmEngine(Engine):
    """Samples responses and takes weight updates. Lives alone in its process: vLLM owns the process's
    threads.

    Methods may be called from any thread: only the thread of ``StepLoop`` calls vLLM. What an update does to
    running samples is ``VllmOptions.on_update``. Sleep waits until every response requested before has
    ended; later ones wait for it.
    """

    def __init__(self, options: VllmOptions) -> None:
        """Build the engine; weights come with the first update."""
        self._options = options
        self._can_sleep = bool(options.arguments.get("enable_sleep_mode", False))
        self._box: Box = []
        self._interrupted = Interrupted([])
        """What the last update interrupted."""
        self._paused_at = 0.0
        """When the last update began, ``time.perf_counter`` seconds."""
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
        """Join the weight-transfer group, this engine's workers from ``first_rank`` on; blocks until every
        member has come."""
        mine = receiver.ReceiverAddress(address, first_rank, backend)
        # The next update follows, also where one that is staged waits for samples.
        self._loop.post(lambda sampler: sampler.join_transfer(mine), overtakes=True).result()

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        """Receive a broadcast weight update as ``version`` and reset the prefix cache; returns a receipt per
        worker."""
        if self._options.stages_updates:
            self.stage_weights(manifest, bucket_bytes)
            self.load_staged(version)
            return self._loaded.result()
        self.begin_update()
        self._loop.call(lambda sampler: sampler.load((manifest, bucket_bytes)))
        return self.finish_update(version)

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> None:
        """Receive a broadcast weight update beside the samples that run, and keep it aside for
        ``load_staged``."""
        receiver_of_worker = self._loop.post(
            lambda sampler: sampler.weight_receiver(), overtakes=True
        ).result()
        # In this thread, while that of the loop goes on stepping.
        self._staged = receiver_of_worker.stage(manifest, bucket_bytes)

    def load_staged(self, version: int) -> None:
        """Load what ``stage_weights`` received last as ``version``, as soon as an update may begin. Returns
        at once.

        What is submitted later is sampled with it.
        """
        staged, self._staged = self._staged, []

        def load(sampler: VllmSampler) -> list[LoadReceipt]:
            self._begin(sampler)
            sampler.load(staged)
            return self._finish(sampler, version)

        self._loaded = self._loop.post(load, after=self._update_waits_for, hold="update", release="update")

    def loaded(self) -> list[LoadReceipt] | None:
        """A receipt per worker of the last ``load_staged``; None: it is still to come."""
        return self._loaded.result() if self._loaded.done() else None

    def device_keys(self) -> list[str]:
        """The device of each worker, named as trainer ranks name theirs."""
        return self._loop.call(lambda sampler: sampler.device_keys())

    def begin_update(self) -> None:
        """Make the model loadable; every bucket of the update follows, then ``finish_update``. Sampling
        pauses.

        Running samples are dealt with as ``VllmOptions.on_update`` says; with ``deterministic_steps`` once
        these are made.
        """
        self._loop.call(self._begin, after=self._update_waits_for, hold="update")

    def load_bucket(self, handle: BucketHandle) -> None:
        """Load one lent bucket; its lender may take the memory back when this returns."""
        self._loop.call(lambda sampler: sampler.load(handle))

    def finish_update(self, version: int) -> list[LoadReceipt]:
        """End the update as ``version`` and reset the prefix cache; returns a receipt per worker."""
        return self._loop.call(lambda sampler: self._finish(sampler, version), release="update")

    def abandon_update(self) -> None:
        """Close an update that broke off. Sampling pauses until another one is finished, because the weights
        are a mixture."""
        self._loop.call(lambda sampler: sampler.finish_update(UNKNOWN))

    @property
    def _update_waits_for(self) -> After:
        return "all" if self._options.on_update == "finish" or self._options.deterministic else "priority"

    def interrupted(self) -> Interrupted:
        """What the last update did to samples that were submitted."""
        return self._interrupted

    def resume(self) -> None:
        """Make ``VllmOptions.deterministic_steps`` steps with the weights that the engine holds, if that is
        given.

        Without this call submitted samples wait after an update, and after these steps until the next update.
        """
        steps = self._options.deterministic_steps
        if steps is not None:
            self._loop.call(lambda _: self._loop.limit(steps))

    def finish(self, numbers: Sequence[int]) -> None:
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
            self._loop.call(lambda sampler: sampler.sleep(), after="all", hold="memory")
        return self._can_sleep

    def wake_up(self, tags: Sequence[MemoryTag]) -> bool:
        """Take the memory of ``tags`` again, its contents undefined; False, having done nothing, if it cannot
        sleep."""
        if self._can_sleep:
            last = "memory" if "kv_cache" in tags else ""
            self._loop.call(lambda sampler: sampler.wake_up(tags), release=last)
        return self._can_sleep

    def reset_prefix_cache(self) -> None:
        """Drop cached prefixes."""
        self._loop.call(lambda sampler: sampler.reset_prefix_cache())

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

        Raises like ``collect``, and ``EpisodeFailedError`` when an environment failed.
        """
        box: Box = []
        self._loop.submit(
            [QueuedSample(row, request, options, has_priority=True) for row, request in enumerate(requests)],
            box,
        )
        collected = _collected(self._loop.take(box, at_least=len(requests)))
        for why in collected.failures.values():
            raise EpisodeFailedError(why)
        return sorted(collected.samples, key=attrgetter("number"))

    # in the thread of the loop

    def _begin(self, sampler: VllmSampler) -> None:
        self._paused_at = time.perf_counter()
        if self._options.deterministic_steps is not None:
            self._loop.limit(0)
        cut = self._loop.cut(sampler) if self._options.on_update == "recompute" else []
        so_far: dict[int, Sample] = dict(self._loop.so_far(sampler))
        again = sum(len(one.request.prompt_token_ids) + num_tokens(so_far[one.number].parts) for one in cut)
        self._interrupted = Interrupted(list(so_far.values()), recomputed_tokens=again)
        sampler.begin_update()

    def _finish(self, sampler: VllmSampler, version: int) -> list[LoadReceipt]:
        sampler.finish_update(version)
        receipts = sampler.receipts()
        self._interrupted = replace(self._interrupted, pause_seconds=time.perf_counter() - self._paused_at)
        return receipts


def _collected(ended: Box) -> Collected:
    """Raise what came in the place of a sample, but for environments that failed."""
    samples, failures = list[Sample](), dict[int, str]()
    for number, outcome in ended:
        if isinstance(outcome, EpisodeFailedError):
            failures[number] = str(outcome)
        elif isinstance(outcome, Exception):
            raise outcome
        else:
            samples.append(outcome)
    return Collected(samples, failures)
