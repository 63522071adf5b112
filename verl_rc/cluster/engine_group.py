"""The engines as one: requests are shared out among them, completions come back in the order of the requests."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from verl_rc.cluster.engine_work import EngineWork
from verl_rc.cluster.environment import engine_environment
from verl_rc.cluster.placement import Placement
from verl_rc.cluster.remote import (
    HangError,
    Pending,
    ProcessLostError,
    RemoteError,
    RemoteProcess,
    answers,
    longest_busy,
    wait_for_all,
)
from verl_rc.data.batches import Completions, Timed
from verl_rc.rollout.sampling import EngineOptions, GenerationRequest, SamplingOptions
from verl_rc.rollout.step_loop import Sample
from verl_rc.weight_sync.manifest import Manifest
from verl_rc.weight_sync.shared_bucket import BucketHandle
from verl_rc.weight_sync.transfer_group import TransferAddress, TransferBrokenError

_TIMEOUT_KEY = "actor_rollout_ref.rollout.engine_timeout_seconds"
_GRACE_SECONDS = 10.0
"""How long a process that lives may take to notice that one it works with is gone."""
_SLOTS = 2
"""Calls that an engine's process answers at the same time: one may wait for samples, and another be an update of the weights."""


class EnginesLostError(RemoteError):
    """Engines died, or hang; the others are as they were."""

    def __init__(self, lost: Mapping[int, RemoteError], answered: Mapping[int, Any]) -> None:
        """What became of the lost engines, and the answers of the others, by engine."""
        super().__init__("; ".join(dict.fromkeys(str(lost[engine]) for engine in sorted(lost))))
        self.engines = sorted(lost)
        self.answered = dict(answered)


OnLoss = Callable[[EnginesLostError, int], None]
"""Makes the group whole when engines are lost while they generate; it is told how many requests they leave unanswered."""


class EngineGroup:
    """All vLLM engines of a run.

    Methods that raise ``EnginesLostError`` can be called again after ``replace`` and another update of all weights; the weight
    transport must be opened again before.
    """

    worker = "verl_rc.rollout.engine:RolloutEngine"
    """What every process of the group builds, as ``module:Class``; tests plant faulty ones here."""

    def __init__(self, placement: Placement, rank_devices: Sequence[str] = ()) -> None:
        """Start one process per engine; ``build`` makes the engine in it.

        ``rank_devices``: the GPU of each trainer rank, where engines share them. Such an engine reserves no GPU from Ray, which
        could not give it those of several bundles, but sees the ones that its ranks were given.
        """
        environment = engine_environment(placement.engine_threads, placement.device, placement.one_node)
        shares = placement.shares_devices and placement.device == "cuda"
        self._engines = []
        for index, place in enumerate(placement.engine_places):
            beside = ",".join(rank_devices[rank] for rank in placement.ranks_beside(index)) if shares else ""
            own = {**environment, "CUDA_VISIBLE_DEVICES": beside} if shares else environment
            slots = {"max_concurrency": _SLOTS, **place.options(reserve_gpu=not shares)}
            self._engines.append(RemoteProcess(f"rollout engine {index}", own, **slots))
        self._work = EngineWork(len(self._engines))
        self._replaced: set[int] = set()
        """Engines that have not been handed yet what those had in whose places they are."""
        self._handing_over: list[dict[int, Pending]] = []
        """Calls that hand samples over and that nobody has waited for."""
        self._process_group_backend = "gloo" if placement.device == "cpu" else "nccl"

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        return len(self._engines)

    def build(self, options: EngineOptions, timeout_seconds: float) -> list[Pending]:
        """Build the engines; returns at once. An engine that takes longer than ``timeout_seconds`` for a later call counts as
        lost."""
        self._options, self._timeout_seconds = options, timeout_seconds
        return [process.build(self.worker, options=options) for process in self._engines]

    def replace(self, engines: Sequence[int]) -> list[Pending]:
        """End these engines and build others in their places, with the same options and without weights; returns at once."""
        for engine in engines:
            self._engines[engine].replace()
        self._replaced |= set(engines)
        return [self._engines[engine].build(self.worker, options=self._options) for engine in engines]

    def wait(self, pending: Mapping[int, Pending], beside: Sequence[Pending] = ()) -> tuple[dict[int, Any], list[Any]]:
        """The answers of engines by number, and those of the processes they work with, ``beside``.

        Raises ``EnginesLostError`` when an engine died (what failed because it was gone does not count), or did not answer in
        time and nothing else explains that. In a transfer one that hangs can hold up others: all that did not answer count as
        lost. Else raises the first failure, preferably one that is not just the want of another process.
        """
        calls = [*pending.values(), *beside]
        answer_of = {
            item.reference: answer
            for item, answer in answers(calls, self._timeout_seconds, _TIMEOUT_KEY, _GRACE_SECONDS)
        }
        of_engines = {engine: answer_of[item.reference] for engine, item in pending.items()}
        died = {engine: answer for engine, answer in of_engines.items() if isinstance(answer, ProcessLostError)}
        silent = {engine: died.pop(engine) for engine, answer in of_engines.items() if isinstance(answer, HangError)}
        known = [*died.values(), *silent.values()]
        failures = [answer for answer in answer_of.values() if isinstance(answer, RemoteError) and answer not in known]
        causes = [failure for failure in failures if not isinstance(failure, HangError) and not _is_consequence(failure)]
        lost = died if causes else died | silent
        if lost:
            answered = {engine: answer for engine, answer in of_engines.items() if not isinstance(answer, RemoteError)}
            raise EnginesLostError(lost, answered)
        if failures:
            raise [*causes, *failures][0]
        return of_engines, [answer_of[item.reference] for item in beside]

    def describe(self) -> dict[str, Any]:
        """Facts of the first engine, see ``RolloutEngine.describe``; the others are built alike."""
        facts: dict[str, Any] = wait_for_all([self._engines[0].call("describe")])[0]
        return facts

    def join_transfer(self, address: TransferAddress, workers_per_engine: int) -> dict[int, Pending]:
        """Join the weight-transfer group behind the sender, who is rank 0."""
        return {
            index: engine.call("join_transfer", address, 1 + index * workers_per_engine, self._process_group_backend)
            for index, engine in enumerate(self._engines)
        }

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> dict[int, Pending]:
        """Take one weight update; each answer is a list of receipts, one per worker of the engine."""
        self._wait_for_handed_over()
        return {
            index: engine.call("receive_weights", manifest.to_plain(), bucket_bytes, version)
            for index, engine in enumerate(self._engines)
        }

    def device_keys(self) -> list[str]:
        """The devices that hold engine workers, as trainer ranks name theirs."""
        return [key for of_engine in self._call_all("device_keys") for key in of_engine]

    def begin_update(self) -> None:
        """Make every engine's model loadable, before its first lent bucket. Raises ``EnginesLostError``."""
        self._wait_for_handed_over()
        self._call_all("begin_update")

    def load_bucket(self, handle: BucketHandle) -> None:
        """Load one lent bucket; its lenders may take the memory back when this returns. Raises ``EnginesLostError``."""
        self._call_all("load_bucket", handle)

    def finish_update(self, version: int) -> list[list[dict[str, Any]]]:
        """Call what was loaded ``version``; for each engine a receipt per worker. Raises ``EnginesLostError``."""
        return self._call_all("finish_update", version)

    def abandon_update(self) -> None:
        """Have the engines that live close an update that broke off; returns at once."""
        for engine in self._engines:
            engine.call("finish_update", -1)

    def sleep(self) -> None:
        """Give up the memory of weights and key-value cache, where engines can. Raises ``EnginesLostError``."""
        self._wait_for_handed_over()
        self._call_all("sleep")

    def wake_up(self, *tags: str) -> None:
        """Take memory again, ``weights`` or ``kv_cache``, where engines can sleep. Raises ``EnginesLostError``."""
        self._call_all("wake_up", tags)

    def submit(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[int]:
        """Hand requests over, those of one prompt to the engine with the fewest unfinished; returns their numbers, at once.

        They are sampled by the weights that the engines have, or get by an update that has begun.
        """
        numbers, of_engines = self._work.add(requests, options, awaited=False)
        self._handing_over.append(self._hand_over(of_engines))  # an engine that takes 256 requests in may not answer for 0.2 s
        return numbers

    def _wait_for_handed_over(self) -> None:
        """Until engines have what was submitted: a later call could overtake it, as an engine answers several at a time."""
        handing_over, self._handing_over = self._handing_over, []
        for pending in handing_over:
            with suppress(EnginesLostError):  # the next ``collect`` finds it too
                self.wait(pending)

    def collect(self, wait_seconds: float, on_loss: OnLoss | None = None) -> list[int]:
        """Fetch what has ended; every busy engine waits at most ``wait_seconds`` for something to end.

        What lost engines had is handed to those that ``on_loss`` puts in their places; without it the loss is raised, and they
        get it when ``collect`` is called again after ``replace`` and an update.

        Returns:
            The numbers that can be taken, in ascending order.
        """
        self._collect(dict.fromkeys(self._work.busy_engines(), 1), wait_seconds, on_loss)
        return self._work.ended()

    def take(self, numbers: Sequence[int]) -> Completions:
        """The completions of these numbers, in this order, once all have been collected; each can be taken once."""
        return self._work.take(numbers)

    def generate(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions, on_loss: OnLoss | None = None
    ) -> Timed[Completions]:
        """One completion per request, in order; the requests are shared out evenly.

        When engines are lost, ``on_loss`` replaces them and gives them weights, or raises; without it the loss is raised. Each
        new engine gets what the old one had not given back: in the same composition, when nothing had been collected. A request's
        seed is all that a sample depends on, so it comes out as it would have.
        """
        numbers, of_engines = self._work.add(requests, options, awaited=True)
        self._hand_over(of_engines)
        return self.finish(numbers, on_loss)

    def finish(self, numbers: Sequence[int], on_loss: OnLoss | None = None) -> Timed[Completions]:
        """The completions of these numbers, in this order, once all have ended; each can be taken once. See ``generate``."""
        busy_seconds = 0.0
        try:
            while missing := self._work.missing(numbers):
                busy_seconds = max(busy_seconds, self._collect(missing, None, on_loss))
        except RemoteError:
            self._work.forget(numbers)
            raise
        return Timed(self._work.take(numbers), busy_seconds)

    def _hand_over(self, of_engines: Mapping[int, Sequence[Sample]]) -> dict[int, Pending]:
        """Submit samples; returns at once. A failure is also one of the next ``collect``."""
        return {engine: self._engines[engine].call("submit", samples) for engine, samples in of_engines.items()}

    def _collect(self, at_least: Mapping[int, int], wait_seconds: float | None, on_loss: OnLoss | None) -> float:
        """Wait until each of these engines has so many ended samples, and keep them; returns the longest of the waits."""
        self._hand_over({engine: self._work.unfinished(engine) for engine in sorted(self._replaced)})
        self._replaced.clear()
        pending = {
            engine: self._engines[engine].call("collect", number, wait_seconds, what="generate")
            for engine, number in at_least.items()
        }
        try:
            self._work.file(self.wait(pending)[0])
        except EnginesLostError as error:
            self._work.file(error.answered)
            if on_loss is None:
                raise
            on_loss(error, sum(len(self._work.unfinished(engine)) for engine in error.engines))
        return longest_busy(list(pending.values()))

    def generate_on_each(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Completions]:
        """Every engine answers all requests: for comparing engines with the trainer one by one. Raises ``EnginesLostError``."""
        return self._call_all("generate", list(requests), options)

    def _call_all(self, method: str, *arguments: Any) -> list[Any]:
        answered, _ = self.wait({index: engine.call(method, *arguments) for index, engine in enumerate(self._engines)})
        return list(answered.values())


def _is_consequence(failure: RemoteError) -> bool:
    """Whether a process failed because another one was gone."""
    return isinstance(failure.cause, TransferBrokenError)
