"""A real engine that can be asked what it would tell vLLM where sleeping is possible."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

from verl_rc.runtime.rollout.conversation import Conversations
from verl_rc.runtime.rollout.sampling import ConversationOptions
from verl_rc.runtime.rollout.vllm.engine import VllmEngine
from verl_rc.runtime.rollout.vllm.options import OnUpdate
from verl_rc.runtime.rollout.vllm.sampler import VllmSampler
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt


class RecordingLoop:
    """Carries actions out on a sampler whose vLLM does nothing but remember them."""

    def __init__(self, adapter: Any) -> None:
        self.sampler = VllmSampler.__new__(VllmSampler)
        self.sampler._llm, self.sampler._adapter = Mock(), adapter

    def call(self, action: Callable[[Any], Any], **_: Any) -> Any:
        return action(self.sampler)


class ObservedEngine(VllmEngine):
    """A VllmEngine whose calls to vLLM can be recorded instead of made, and whose steps are counted on
    request."""

    def act_on_update(self, what: OnUpdate) -> None:
        """From now on do this to running samples at an update."""
        self._options = replace(self._options, on_update=what)
        self._loop.call(lambda sampler: setattr(sampler, "_reuses_cache", what == "keep"))

    def forget_weights(self) -> None:
        """As if none had ever come."""
        self._loop.call(lambda sampler: setattr(sampler.weight_receiver(), "_holds_weights", False))

    def receive_beside(self, manifest: Manifest, bucket_bytes: int, version: int) -> None:
        """Begin a staged update, and return; ``received`` has its receipts."""
        self._options = replace(self._options, stages_updates=True)
        self._receiving = ThreadPoolExecutor(1).submit(self.receive_weights, manifest, bucket_bytes, version)

    def received(self) -> list[LoadReceipt]:
        """End what ``receive_beside`` began."""
        self._options = replace(self._options, stages_updates=False)
        return self._receiving.result()

    def after_steps(self, count: int) -> None:
        """Decode samples without priority in exactly so many further steps; returns after the last one."""
        self._loop.call(lambda _: self._loop.limit(count))
        self._loop.call(lambda _: None, after="all")

    def reset_prefix_cache(self) -> None:
        self._loop.call(lambda sampler: sampler.reset_prefix_cache())

    def count_preemptions(self) -> int:
        """How often a running request has lost its blocks of the cache, since this was asked first."""
        return self._loop.call(_counted_preemptions)

    def converse_by(self, conversations: Any) -> None:
        """From now on take turns with tools as ``conversations`` says; None: no tools again."""
        self._loop.call(lambda sampler: setattr(sampler, "_conversations", conversations))

    def converse(self, options: ConversationOptions | None) -> None:
        """From now on answer turns as ``options`` say; None: no turn is answered."""
        conversations = None if options is None else Conversations.from_options(options)
        self.converse_by(conversations)

    def calls_around_an_update(self) -> list[Any]:
        """What a sleep, and the two wakings around an update, ask of a vLLM built with
        ``enable_sleep_mode``."""
        can_sleep, loop = self._can_sleep, self._loop
        recording = RecordingLoop(loop.call(lambda sampler: sampler._adapter))
        self._can_sleep, self._loop = True, recording
        try:
            answers = [self.sleep(), self.wake_up(["weights"]), self.wake_up(["kv_cache"])]
            assert answers == [True, True, True]
            return [
                (name, arguments, options) for name, arguments, options in recording.sampler._llm.mock_calls
            ]
        finally:
            self._can_sleep, self._loop = can_sleep, loop


def _counted_preemptions(sampler: Any) -> int:
    scheduler = sampler._llm.llm_engine.engine_core.engine_core.scheduler
    if not hasattr(scheduler, "preemptions"):
        scheduler.preemptions, preempt = [], scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> None:
            scheduler.preemptions.append(arguments)
            preempt(*arguments, **options)

        scheduler._preempt_request = counted
    return len(scheduler.preemptions)
