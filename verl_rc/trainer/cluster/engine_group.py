"""The group of all engines: distributes requests and returns samples in the order of the requests."""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_rc.metrics.trace import TRACE
from verl_rc.records.parts import Sample
from verl_rc.runtime.distributed.child_process import HangError, ProcessLostError, RemoteError
from verl_rc.runtime.rollout.engine import EngineFacts, EngineOptions, Interrupted, Request
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress, TransferBrokenError
from verl_rc.runtime.workers.environment import LOOPBACK, engine_environment
from verl_rc.trainer.cluster.engine_work import AssignedRequest, EngineWork, num_unfinished
from verl_rc.trainer.cluster.further_nodes import FurtherNodes
from verl_rc.trainer.cluster.placement import Placement
from verl_rc.trainer.cluster.remote import (
    Pending,
    RemoteProcess,
    as_completed,
    first_answered,
    shared,
    wait_for_all,
)

_TIMEOUT_KEY = "trainer.hang_timeout_seconds"
_START_TIMEOUT_KEY = "trainer.ready_timeout_seconds"
_GRACE_SECONDS = 10.0
"""Time for a live process to notice that a process it communicates with has died."""
_OPEN_SECONDS, _LINGER_SECONDS = 5.0, 0.05
"""Longest wait of an engine for the first sample that ends, and then for further ones."""
_SLOTS = 2
"""Concurrent calls of an engine's process: one may wait for samples while another updates the weights."""


class EnginesLostError(RemoteError):
    """Some engines died or hang; the others are unchanged."""

    def __init__(self, lost: Mapping[int, RemoteError], answered: Mapping[int, Any]) -> None:
        """The errors of the lost engines, and the answers of the others, by engine."""
        super().__init__("; ".join(dict.fromkeys(str(lost[engine]) for engine in sorted(lost))))
        self.engines = sorted(lost)
        self.answered = dict(answered)


EngineReplacer = Callable[[EnginesLostError], None]
"""Replaces the lost engines and sends weights to all engines, or raises."""


class EngineGroup:
    """All engines of a run, each behind the protocol ``Engine``.

    Methods that raise ``EnginesLostError`` can be called again after ``replace``, opening the weight
    transport again and another update of all weights.
    """

    def __init__(self, placement: Placement, rank_devices: Sequence[str] = ()) -> None:
        """Start one process per node of each engine; ``build`` creates the engine in them.

        ``rank_devices``: the GPU of each trainer rank, when engines share them. Such an engine reserves no
        GPU from Ray, which cannot assign GPUs of several bundles to one actor; it uses the GPUs of its ranks.
        """
        environment = engine_environment(placement.engine_threads, placement.device, placement.one_node)
        shares = placement.shares_devices and placement.device == "cuda"

        def start(name: str, place: int, **slots: int) -> RemoteProcess:
            devices = ",".join(rank_devices[rank] for rank in placement.ranks_beside(place)) if shares else ""
            process_environment = {**environment, "CUDA_VISIBLE_DEVICES": devices} if shares else environment
            options = placement.engine_places[place].options(reserve_gpu=not shares)
            return RemoteProcess(name, process_environment, **slots, **options)

        self._engines, self._further = list[RemoteProcess](), list[FurtherNodes]()
        for index in range(placement.num_engines):
            name, nodes = f"rollout engine {index}", placement.nodes_per_engine
            first, *others = range(index * nodes, (index + 1) * nodes)
            self._engines.append(start(name, first, max_concurrency=_SLOTS))
            further = [start(f"{name} on its node {number}", place) for number, place in enumerate(others, 2)]
            host = LOOPBACK if placement.one_node else None
            self._further.append(FurtherNodes(self._engines[-1], further, host))
        self._work = EngineWork(len(self._engines))
        self._replaced: set[int] = set()
        """Replaced engines that have not yet received the unfinished samples of their predecessors."""
        self._open: dict[int, Pending] = {}
        """The call of ``collect`` that each busy engine has not answered yet."""
        self._submissions: list[dict[int, Pending]] = []
        """Calls of ``submit`` whose answer is still to come."""
        self._process_group_backend = "gloo" if placement.device == "cpu" else "nccl"

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._engines)

    def prepare(self, options: EngineOptions) -> list[Pending]:
        """Import what engines need, which takes longer than to build one; returns at once."""
        imports = [process.prepare(options.worker) for process in self._engines]
        return imports + [call for further in self._further for call in further.prepare(options)]

    def build(self, options: EngineOptions, timeout_seconds: float) -> list[Pending]:
        """Start building the engines; returns at once. An engine that exceeds ``timeout_seconds`` in a later
        call is lost."""
        self._options = options
        self._timeout_seconds = timeout_seconds
        if options.deterministic:
            self._work = EngineWork(len(self._engines), by_seed=True)
        return [call for engine in range(len(self._engines)) for call in self._build(engine)]

    def _build(self, engine: int) -> list[Pending]:
        """Start building an engine on all its nodes. The first call ends when all have, or one is lost."""
        options, further = self._further[engine].build(self._options)
        return [self._engines[engine].build(options.worker, options=options), *further]

    def num_held(self, engines: Sequence[int]) -> int:
        """Number of unfinished requests of these engines; a replaced engine holds none until they are
        submitted again."""
        return len(self._work.unfinished(set(engines) - self._replaced))

    def replace(self, engines: Sequence[int], timeout_seconds: float) -> None:
        """Kill these engines and start new ones with the same options, without weights.

        Raises ``EnginesLostError`` for those that have not started within ``timeout_seconds``.
        """
        for engine in engines:
            self._engines[engine].replace()
            self._further[engine].replace()
            self._open.pop(engine, None)
        self._replaced |= set(engines)
        try:
            starts = [self._build(engine)[0] for engine in engines]
        except RemoteError as error:
            raise EnginesLostError(dict.fromkeys(engines, error), {}) from error
        results = dict(
            as_completed(starts, timeout_seconds, _START_TIMEOUT_KEY, math.inf, self._beside_waits)
        )
        answers = {
            engine: self._further[engine].explained(results[start])
            for engine, start in zip(engines, starts, strict=True)
        }
        lost = {engine: error for engine, error in answers.items() if isinstance(error, RemoteError)}
        if lost:
            raise EnginesLostError(lost, {})

    def wait(
        self,
        pending: Mapping[int, Pending],
        peers: Sequence[Pending] = (),
        waited_seconds: float = 0.0,
    ) -> tuple[dict[int, Any], list[Any]]:
        """Wait for the answers of engines, by number, and of ``peers``, the processes they communicate with;
        ``waited_seconds`` were waited before.

        Raises ``EnginesLostError`` when an engine died, or when one did not answer in time and no process
        failed of itself. Failures that follow from an engine's death do not count. In a transfer a hanging
        engine can block others, so all engines without an answer count as lost. Otherwise raises the first
        failure, preferably one that does not follow from another.
        """
        calls = [*pending.values(), *peers]
        seconds = max(0.0, self._timeout_seconds - waited_seconds)
        results = dict(as_completed(calls, seconds, _TIMEOUT_KEY, _GRACE_SECONDS, self._beside_waits))
        for engine, call in pending.items():
            results[call] = self._further[engine].explained(results[call])
        by_engine = {engine: results[call] for engine, call in pending.items()}
        lost = {engine: error for engine, error in by_engine.items() if isinstance(error, ProcessLostError)}
        failures = [
            error
            for error in results.values()
            if isinstance(error, RemoteError) and error not in lost.values()
        ]
        causes = [
            failure
            for failure in failures
            if not isinstance(failure, HangError) and not isinstance(failure.cause, TransferBrokenError)
        ]
        if causes:  # a silent engine may wait for a failed one
            lost = {engine: error for engine, error in lost.items() if not isinstance(error, HangError)}
        if lost:
            answered = {
                engine: answer for engine, answer in by_engine.items() if not isinstance(answer, RemoteError)
            }
            raise EnginesLostError(lost, answered)
        if failures:
            raise [*causes, *failures][0]
        return by_engine, [results[call] for call in peers]

    @property
    def _beside_waits(self) -> Callable[[], None] | None:
        """What is done while engines are waited for."""
        return self._end_lost if any(self._further) else None

    def _end_lost(self) -> None:
        """Kill what is left of engines that have lost a node: it would not answer."""
        for further in self._further:
            further.end_if_lost()

    def facts(self) -> EngineFacts:
        """Properties of the first engine; all engines are alike."""
        facts: EngineFacts = wait_for_all([self._engines[0].call("facts")])[0]
        return facts

    def join_transfer(self, address: TransferAddress, workers_per_engine: int) -> dict[int, Pending]:
        """Join the weight-transfer group after the sender, which is rank 0."""
        return {
            index: engine.call(
                "join_transfer", address, 1 + index * workers_per_engine, self._process_group_backend
            )
            for index, engine in enumerate(self._engines)
        }

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> dict[int, Pending]:
        """Receive one weight update; each answer is a list of receipts, one per worker of the engine."""
        self._wait_for_submitted()
        return self._call_each("receive_weights", shared(manifest), bucket_bytes, version)

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> dict[int, Pending]:
        """Receive one weight update beside the samples that run; it is loaded by ``load_staged``."""
        return self._call_each("stage_weights", shared(manifest), bucket_bytes)

    def load_staged(self, version: int) -> None:
        """Let each engine load the update as ``version`` once it has ended what was submitted before; does
        not wait for that.

        Raises ``EnginesLostError``.
        """
        self._wait_for_submitted()
        self._call_all("load_staged", version)

    def loaded(self) -> list[list[LoadReceipt] | None]:
        """Each engine's receipts, one per worker, of the update last staged. None means not loaded. Raises
        ``EnginesLostError``."""
        return self._call_all("loaded")

    def device_keys(self) -> list[str]:
        """The devices that hold engine workers, as trainer ranks name theirs."""
        return [key for keys in self._call_all("device_keys") for key in keys]

    def begin_update(self) -> None:
        """Prepare every engine's model for loading weights. Raises ``EnginesLostError``."""
        self._wait_for_submitted()
        self._call_all("begin_update")

    def load_bucket(self, handle: BucketHandle) -> None:
        """Load one shared bucket; the ranks may reuse its memory afterwards. Raises ``EnginesLostError``."""
        self._call_all("load_bucket", shared(handle))

    def finish_update(self, version: int) -> list[list[LoadReceipt]]:
        """End the update as ``version``; returns a receipt per worker of each engine. Raises
        ``EnginesLostError``."""
        return self._call_all("finish_update", version)

    def trace_activity(self) -> None:
        """Write into the run's trace when engines decoded since the last call. Raises
        ``EnginesLostError``."""
        for engine, spans in zip(self._engines, self._call_all("activity"), strict=True):
            for begin, end in spans:
                TRACE.span(engine.name, "decode", begin, end)

    def switch_trace(self, engine: int, path: Path | None) -> None:
        """Begin or write the trace of an engine; see ``StepTrace.switch``. The next ``collect`` reports a
        loss."""
        with suppress(EnginesLostError):
            self.wait({engine: self._engines[engine].call("switch_trace", path)})

    def abandon_update(self) -> None:
        """Close an interrupted update on the live engines; returns at once."""
        self._call_each("abandon_update")

    def sleep(self) -> None:
        """Free the memory of weights and KV cache if engines can sleep. Raises ``EnginesLostError``."""
        self._wait_for_submitted()
        self._call_all("sleep")

    def wake_up(self, *tags: str) -> None:
        """Allocate memory again, ``weights`` or ``kv_cache``, if engines can sleep. Raises
        ``EnginesLostError``."""
        self._call_all("wake_up", tags)

    def submit(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        *,
        owners: Sequence[Any],
        evenly: bool = False,
    ) -> None:
        """Submit requests, those of one prompt to the engine with the fewest unfinished samples; returns at
        once.

        They are sampled with the engines' current weights, or those of an update in progress. ``collect``
        returns them with their ``owners``. With ``evenly`` engines share the requests of one prompt where
        that balances their load.
        """
        self._resubmit_after_losses()
        self._submit(self._work.add(requests, options, awaited=False, evenly=evenly, owners=owners))

    def submit_to_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> list[list[AssignedRequest]]:
        """Submit all requests to every engine, ahead of the samples that wait there; returns them by engine
        at once, for ``finish``."""
        self._resubmit_after_losses()
        added = self._work.add_to_each(requests, options)
        self._submit([request for requests_of_engine in added for request in requests_of_engine])
        return added

    def submitted(self) -> list[AssignedRequest]:
        """The requests of ``submit`` that neither ``collect`` nor ``wait_for`` has returned."""
        return self._work.owned()

    def _wait_for_submitted(self) -> None:
        """Wait until engines hold all submitted requests: an engine runs two calls at a time, so a later call
        could overtake a submission."""
        submissions, self._submissions = self._submissions, []
        for pending in submissions:
            with suppress(EnginesLostError):  # the next ``collect`` finds it too
                self.wait(pending)

    def collect(
        self, wait_seconds: float, replace_lost: EngineReplacer | None = None
    ) -> list[AssignedRequest]:
        """Return the submitted requests that have ended, in the order of submission, each once.

        Waits at most ``wait_seconds`` for the first of them. A call to every busy engine stays open until
        some of its requests have ended, at most a quarter of them, so that many short samples take few
        calls.

        ``replace_lost`` replaces lost engines; the new ones get their unfinished samples. Without
        ``replace_lost`` the loss is raised, and the next ``collect`` after ``replace`` and an update submits
        these samples again.
        """
        self._resubmit_after_losses()
        for engine, count in self._work.num_busy().items():
            if engine not in self._open:
                at_least = -(-count // 4)
                self._open[engine] = self._call_collect(engine, at_least, _OPEN_SECONDS, _LINGER_SECONDS)
        self._record_answered(wait_seconds, replace_lost)
        return self._work.take_ended()

    def _record_answered(self, wait_seconds: float, replace_lost: EngineReplacer | None) -> None:
        """Store what engines have answered to open calls. One that has not answered for too long is lost."""
        self._end_lost()
        came = first_answered(list(self._open.values()), wait_seconds) if self._open else []
        ages = {engine: time.time() - call.sent_at for engine, call in self._open.items()}
        ended = {
            engine: self._open.pop(engine)
            for engine, age in ages.items()
            if self._open[engine] in came or age > self._timeout_seconds
        }
        waited = max((ages[engine] for engine in ended), default=0.0)
        self._record(ended, self._work.record, replace_lost, waited)

    def cancel(self, requests: Sequence[AssignedRequest]) -> None:
        """Stop submitted requests: they are neither collected nor submitted again when their engine is
        lost."""
        self._notify_all("cancel", [request.number for request in requests])
        self._work.cancel(requests)

    def collect_parts(
        self, replace_lost: EngineReplacer | None = None
    ) -> tuple[list[AssignedRequest], dict[int, Interrupted]]:
        """Return the requests that have ended, as ``collect`` does without waiting, and what the last update
        interrupted in each busy engine.

        The requests that have not ended (``submitted``) get the tokens that they had when the update began,
        and another engine continues from there if theirs is lost. ``replace_lost`` is that of ``collect``.
        """
        busy = self._work.num_busy()
        interruptions = {engine: self._engines[engine].call("interrupted") for engine in busy}
        interrupted = self._record(interruptions, self._work.record_parts, replace_lost)
        if self._open:  # they have taken what ended before the update
            self._record_answered(0.0, replace_lost)
        ended = {engine: self._call_collect(engine, 0, 0.0) for engine in busy}
        self._record(ended, self._work.record, replace_lost)
        return self._work.take_ended(), interrupted

    def begin_steps(self) -> None:
        """Let engines go on with the weights that they hold; those that are not ``deterministic`` do so
        anyway."""
        if self._options.deterministic:
            self._resubmit_lost()
            self._notify_all("resume")

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        replace_lost: EngineReplacer | None = None,
    ) -> list[Sample]:
        """One sample per request, in order; the requests are shared out evenly.

        ``replace_lost`` replaces lost engines; without it the loss is raised. Each new engine gets the
        unfinished samples of the old one, in the same batch when nothing had been collected. A sample depends
        only on its request's seed, so the result is the same.
        """
        self._resubmit_after_losses()
        added = self._work.add(requests, options, awaited=True, evenly=True)
        self._submit(added)
        return self.finish(added, replace_lost)

    def finish(
        self, requests: Sequence[AssignedRequest], replace_lost: EngineReplacer | None = None
    ) -> list[Sample]:
        """The samples of these requests, in this order, once all have ended. See ``generate``.

        Raises ``EpisodeFailedError`` when one failed.
        """
        try:
            self.wait_for(requests, replace_lost)
        except RemoteError:
            self._work.cancel(requests)
            raise
        return [request.sample for request in requests]

    def wait_for(
        self, requests: Sequence[AssignedRequest], replace_lost: EngineReplacer | None = None
    ) -> None:
        """Wait until these requests have ended, also where engines would wait for the next update, and count
        them as collected. ``replace_lost`` is that of ``collect``."""
        while unfinished := num_unfinished(requests):
            self._resubmit_after_losses()
            if self._options.deterministic:
                self._notify_all("finish", [request.number for request in requests])
            # An open call may have taken some of them, and ends soon.
            pending = {
                engine: self._open.pop(engine)
                if engine in self._open
                else self._call_collect(engine, number, None)
                for engine, number in unfinished.items()
            }
            self._record(pending, self._work.record, replace_lost)
        self._work.take(requests)

    def _submit(self, requests: Sequence[AssignedRequest]) -> None:
        """Submit requests to their engines; returns at once, because an engine may take 0.2 s to accept 256
        requests. The next ``collect`` reports a failure."""
        queued_by_engine: dict[int, list[Request]] = defaultdict(list)
        for request in requests:
            queued_by_engine[request.engine].append(request.queued)
        self._submissions.append(
            {
                engine: self._engines[engine].call("submit", queued)
                for engine, queued in queued_by_engine.items()
            }
        )

    def _call_collect(self, engine: int, *arguments: float | None) -> Pending:
        return self._engines[engine].call("collect", *arguments, task="generate")

    def _resubmit_after_losses(self) -> None:
        """Submit the unfinished samples of lost engines to the engines that replaced them, and let these
        begin to step.

        Call it before adding samples: those of a replaced engine would be submitted twice. Call it before
        telling engines which samples to finish: engines forget that when they are told to resume.
        """
        if self._replaced:
            self._resubmit_lost()
            self.begin_steps()

    def _resubmit_lost(self) -> None:
        """Submit the unfinished samples of lost engines to those that replaced them."""
        self._work.forget_cancelled(self._replaced)
        self._submit(self._work.unfinished(self._replaced))
        self._replaced.clear()

    def _record(
        self,
        pending: Mapping[int, Pending],
        record: Callable[[Mapping[int, Any]], None],
        replace_lost: EngineReplacer | None,
        waited_seconds: float = 0.0,
    ) -> dict[int, Any]:
        """Wait for the answers of engines, ``record`` and return them; those of lost engines are missing.

        Without ``replace_lost`` the loss is raised once the other answers are recorded.
        """
        try:
            answered = self.wait(pending, waited_seconds=waited_seconds)[0]
            record(answered)
        except EnginesLostError as error:
            answered = error.answered
            record(answered)
            if replace_lost is None:
                raise
            replace_lost(error)
        return answered

    def _notify_all(self, method: str, *arguments: Any) -> None:
        """Call every engine once it holds all submitted requests. The next ``collect`` reports a loss."""
        self._wait_for_submitted()
        with suppress(EnginesLostError):
            self._call_all(method, *arguments)

    def generate_on_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> list[list[Sample]]:
        """Send all requests to every engine, to compare each engine with the trainer. Raises
        ``EnginesLostError``."""
        return self._call_all("generate", shared(list(requests)), options)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        answers, _ = self.wait(self._call_each(method, *arguments))
        return list(answers.values())

    def _call_each(self, method: str, *arguments: Any) -> dict[int, Pending]:
        return {index: engine.call(method, *arguments) for index, engine in enumerate(self._engines)}
