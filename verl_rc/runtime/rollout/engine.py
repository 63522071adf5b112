"""The protocol of an engine, and the records of its calls.

An engine is added as a folder ``rollout/NAME`` and by its name among those of
``actor_rollout_ref.rollout.name``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal, Protocol

from verl_rc.config.run import RunConfig
from verl_rc.records.parts import Sample, num_tokens
from verl_rc.runtime.rollout.environment_host import Hosts
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.runtime.weight_sync.manifest import Manifest
from verl_rc.runtime.weight_sync.proof import LoadReceipt
from verl_rc.runtime.weight_sync.shared_bucket import BucketHandle
from verl_rc.runtime.weight_sync.transfer_group import TransferAddress

MemoryTag = Literal["weights", "kv_cache"]
"""The parts of an engine's memory that sleep and wake by themselves."""


@dataclass(frozen=True)
class Request:
    """One response that an engine is to sample, from its submission to its end."""

    number: int
    """Waiting samples begin in ascending order of this number."""
    request: GenerationRequest
    options: SamplingOptions
    has_priority: bool = False
    """The sample begins before those without priority, and none of them begins until it has ended. Running
    samples continue."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a response without room for another token: no engine can sample it.

        A full response with an environment may still wait for its last reply.
        """
        limit, length = self.request.limit(self.options), num_tokens(self.request.so_far.parts)
        if length >= limit and self.request.episode is None:
            raise ValueError(
                f"a response that is to be sampled must have room for a token, but request {self.number} has "
                f"{length} tokens and a limit of {limit}; raise max_tokens, or take the response as ended."
            )


@dataclass(frozen=True)
class Collected:
    """Samples of one engine that have ended; each is collected once."""

    samples: list[Sample]
    """Samples with a response, in any order."""
    failures: dict[int, str] = field(default_factory=dict)
    """Messages of failed environments, by the numbers of their samples."""


@dataclass(frozen=True)
class Interrupted:
    """Samples of one engine that a weight update interrupted."""

    samples: list[Sample]
    """Samples that had begun and not ended, with their tokens before the update, in any order."""
    pause_seconds: float = 0.0
    """Seconds from the last token before the update until the engine could sample again."""


class EngineOptions(Protocol):
    """The part of an engine's options that the cluster reads. Each engine has a record of its own."""

    worker: ClassVar[str]
    """The class of the engine, as ``module:Class``; it is built with ``options=``."""
    further_worker: ClassVar[str]
    """The class of the part of an engine on each node after the first, see ``FurtherPart``; built alike."""

    @property
    def deterministic(self) -> bool:
        """Whether results must not depend on time: a sample's engine follows from its seed, and engines wait
        for ``resume``."""

    def on_nodes(self, count: int, host: str, port: int) -> "Sequence[EngineOptions]":
        """The options of the parts of an engine on ``count`` nodes, which meet at a port of the first."""


class FurtherPart(Protocol):
    """The part of an engine on a node after its first, alone in a process; the engine needs all its parts."""

    def serve(self) -> None:
        """Compute what the engine's first part asks for; returns when that is over."""


def engine_options(config: RunConfig, device: str, hosts: Hosts | None = None) -> EngineOptions:
    """The options of the engine ``actor_rollout_ref.rollout.name``, by the function of this name in
    ``rollout/NAME/options.py``.

    ``hosts``: of environments in other processes. None if each engine has a host of its own.
    """
    room = import_module(f"verl_rc.runtime.rollout.{config.actor_rollout_ref.rollout.name}.options")
    options: EngineOptions = room.engine_options(config, device, hosts)
    return options


@dataclass(frozen=True)
class EngineFacts:
    """Properties of a running engine."""

    block_size: int
    """Tokens of a block of its prefix cache."""
    measured: Mapping[str, str] = field(default_factory=dict)
    """Results of its measurements on this machine, by name."""


class Engine(Protocol):
    """Samples responses with the weights of a trainer; lives alone in a process, which is ended with it.

    ``submit`` takes requests, and ``collect`` returns each sample once, with the log-prob and the version of
    the weights of every token. Methods may be called from any thread. A method that waits for other calls,
    such as an update that waits for samples, does not hold these calls back.

    The first update has all tensors, later ones may have only those that training changes. An update comes by
    ``receive_weights``; by ``stage_weights`` beside sampling, then ``load_staged``; or by ``begin_update``,
    ``load_bucket`` for each bucket and ``finish_update``. A sample that is submitted after the begin of an
    update gets no token of older weights. An option of the engine says whether samples that were submitted
    before end first, or are cut and continue with the new weights.
    """

    def facts(self) -> EngineFacts:
        """Properties of the running engine."""

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests and return at once. One with ``so_far`` continues with the tokens that it would have
        had without the interruption."""

    def cancel(self, numbers: Sequence[int]) -> None:
        """Stop samples, begun or not; ``collect`` still returns those that have ended."""

    def collect(
        self, at_least: int = 1, wait_seconds: float | None = None, linger_seconds: float | None = None
    ) -> Collected:
        """Submitted samples that have ended; waits until there are ``at_least`` or ``wait_seconds`` are over
        (None: no limit). With ``linger_seconds`` this is the limit from the first one on."""

    def generate(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        """Sample one response per request, in order, with priority over submitted samples that have not
        begun. Raises ``EpisodeFailedError`` when an environment failed."""

    def join_transfer(self, address: TransferAddress, first_rank: int, backend: str) -> None:
        """Join the weight-transfer group, this engine's workers from ``first_rank`` on; blocks until every
        member has come."""

    def receive_weights(self, manifest: Manifest, bucket_bytes: int, version: int) -> list[LoadReceipt]:
        """Receive a broadcast update and load it as ``version``; returns a receipt per worker."""

    def stage_weights(self, manifest: Manifest, bucket_bytes: int) -> None:
        """Receive a broadcast update while samples run, and keep it for ``load_staged``."""

    def load_staged(self, version: int) -> None:
        """Load the last update of ``stage_weights`` as ``version``, as soon as an update may begin; returns
        at once."""

    def loaded(self) -> list[LoadReceipt] | None:
        """A receipt per worker of the last ``load_staged``. None if it has not been loaded yet."""

    def device_keys(self) -> list[str]:
        """The device of each worker, named as trainer ranks name theirs."""

    def begin_update(self) -> None:
        """Make the model loadable, as soon as an update may begin; the engine samples nothing until
        ``finish_update``."""

    def load_bucket(self, handle: BucketHandle) -> None:
        """Load one lent bucket; its lender may take the memory back when this returns."""

    def finish_update(self, version: int) -> list[LoadReceipt]:
        """End the update as ``version``; returns a receipt per worker."""

    def abandon_update(self) -> None:
        """Close an update that broke off. The engine samples nothing until another update is finished."""

    def interrupted(self) -> Interrupted:
        """The samples that the last update interrupted."""

    def resume(self) -> None:
        """Sample submitted requests after an update; only a ``deterministic`` engine waits for this call."""

    def finish(self, numbers: Sequence[int]) -> None:
        """Sample these numbers to their end, even if the engine would wait for the next update."""

    def activity(self) -> list[tuple[float, float]]:
        """Start and end of each span of sampling since the last call, seconds since 1970."""

    def switch_trace(self, path: Path | None) -> None:
        """Begin the trace of what the engine computes, or write it; see ``StepTrace.switch``."""

    def sleep(self) -> bool:
        """Free the memory of weights and KV cache, so that a trainer on the same device can use it.

        Waits until submitted samples have ended. The tensors of updates are lost: ``wake_up(["weights"])``,
        an update and ``wake_up(["kv_cache"])`` must come before the next sample. An engine that cannot sleep
        does nothing and returns False.
        """

    def wake_up(self, tags: Sequence[MemoryTag]) -> bool:
        """Take the memory of ``tags`` again, its contents undefined; an engine that cannot sleep does nothing
        and returns False."""
