"""The book of requests to the engines: which engine has each, and what came of it, until that is taken."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from typing import Any

from verl_rc.records.parts import UNKNOWN, Part, Sample
from verl_rc.runtime.rollout.engine import Collected, Interrupted, Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions


@dataclass(eq=False)
class AssignedRequest:
    """A request of the driver, from its assignment to an engine on."""

    queued: Request
    """The request as the engine has it; after an update that cut it, with its tokens so far."""
    engine: int
    owner: Any = None
    """The group or purpose of its sample; engines do not look at it. None if its caller waits for it."""
    outcome: Sample | str | None = None
    """The request's sample, or the message of its environment, which failed. None before it has ended."""

    @property
    def number(self) -> int:
        """The request's number, which no other request has."""
        return self.queued.number

    @property
    def sample(self) -> Sample:
        """The request's sample, once it has ended. Raises ``EpisodeFailedError`` when it failed."""
        if isinstance(self.outcome, str):
            raise EpisodeFailedError(self.outcome)
        assert self.outcome is not None
        return self.outcome


def assign(prompts: Sequence[Sequence[int]], unfinished: Sequence[int], evenly: bool) -> list[int]:
    """Assign requests to engines: those of one prompt together, to the engine with the fewest unfinished
    samples.

    Args:
        prompts: Token ids of each request's prompt; requests with the same prompt are adjacent, and an engine
            computes it once.
        unfinished: Samples that each engine has already.
        evenly: Split requests of one prompt when they would give an engine more than its share of all
            unfinished samples.

    Returns:
        The engine of each request.
    """
    load = list(unfinished)
    limit = -(-(sum(load) + len(prompts)) // len(load)) if evenly else sum(load) + len(prompts)
    engines: list[int] = []
    for _, group in groupby(prompts):
        left = len(list(group))
        while left:
            engine = load.index(min(load))
            taken = min(left, limit - load[engine])
            engines += [engine] * taken
            load[engine] += taken
            left -= taken
    return engines


class EngineWork:
    """The requests of all engines that were not taken yet."""

    def __init__(self, num_engines: int, by_seed: bool = False) -> None:
        """``by_seed``: a sample's engine follows from its seed, also in a resumed run; else from how busy the
        engines are."""
        self._num_engines = num_engines
        self._by_seed = by_seed
        self._numbers = count()
        self._requests: dict[int, AssignedRequest] = {}
        """Requests by number."""
        self._cancelled: dict[int, int] = {}
        """The engine of each cancelled request, by number; the engine may still answer it."""

    def add(
        self,
        requests: Sequence[GenerationRequest],
        options: SamplingOptions,
        *,
        awaited: bool,
        evenly: bool,
        owners: Sequence[Any] | None = None,
    ) -> list[AssignedRequest]:
        """Assign requests, in order.

        ``awaited``: the caller waits for all of them, so they run before samples without a waiter.
        ``evenly``: see ``assign``.
        """
        if self._by_seed:
            engines = [request.seed % self._num_engines for request in requests]
        else:
            busy = self.num_busy()
            prompts = [request.prompt_token_ids for request in requests]
            engines = assign(prompts, [busy[engine] for engine in range(self._num_engines)], evenly)
        added = [
            AssignedRequest(Request(next(self._numbers), request, options, awaited), engine, owner)
            for request, engine, owner in zip(
                requests, engines, owners or [None] * len(requests), strict=True
            )
        ]
        self._requests |= {request.number: request for request in added}
        return added

    def add_to_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> list[list[AssignedRequest]]:
        """Assign all requests to every engine; returns them by engine.

        The numbers are below all others, so that these samples begin first.
        """
        added = [
            [
                AssignedRequest(Request(-1 - next(self._numbers), request, options), engine)
                for request in requests
            ]
            for engine in range(self._num_engines)
        ]
        self._requests |= {request.number: request for of_engine in added for request in of_engine}
        return added

    def unfinished(self, engines: Collection[int]) -> list[AssignedRequest]:
        """The requests of these engines that have not ended, in the order of their numbers."""
        return [
            self._requests[number]
            for number in sorted(self._requests)
            if self._requests[number].engine in engines and self._requests[number].outcome is None
        ]

    def num_busy(self) -> Counter[int]:
        """Number of requests of each engine that have not ended."""
        return num_unfinished(self._requests.values())

    def owned(self) -> list[AssignedRequest]:
        """The requests that have an owner and were not taken, in the order of their numbers."""
        return [request for request in self._requests.values() if request.owner is not None]

    def record(self, answers: Mapping[int, Collected]) -> None:
        """Note what came of requests, by the engine that answered.

        Raises ``RuntimeError`` when an engine returns a sample that it does not have, or one that cannot be;
        all others are noted.
        """
        problems = []
        for engine, collected in answers.items():
            outcomes: list[tuple[int, Sample | str]] = [
                (sample.number, sample) for sample in collected.samples
            ]
            outcomes += collected.failures.items()
            for number, outcome in outcomes:
                request = self._requests.get(number)
                if number in self._cancelled:
                    del self._cancelled[number]
                elif request is None or request.engine != engine or request.outcome is not None:
                    problems.append(
                        f"rollout engine {engine} must return each of its samples once, but sample {number} "
                        "is none of those that it still has"
                    )
                elif problem := _problem(outcome, engine):
                    problems.append(problem)
                elif isinstance(outcome, Sample) and self._num_engines > 1:
                    request.outcome = replace(outcome, engine=engine)
                else:
                    request.outcome = outcome
        if problems:
            raise RuntimeError(f"{problems[0]}. Its samples cannot be trained on.")

    def record_parts(self, answers: Mapping[int, Interrupted]) -> None:
        """Note how far each engine had come with unfinished samples at its last update: another engine
        continues from there."""
        for engine, interrupted in answers.items():
            for sample in interrupted.samples:
                request = self._requests.get(sample.number)
                if request is not None and request.engine == engine and request.outcome is None:
                    request.queued = replace(
                        request.queued, request=replace(request.queued.request, so_far=sample)
                    )

    def take(self, requests: Sequence[AssignedRequest]) -> None:
        """Strike out requests that have ended."""
        for request in requests:
            del self._requests[request.number]

    def take_ended(self) -> list[AssignedRequest]:
        """Strike out the requests with an owner that have ended, and return them, in the order of their
        numbers."""
        ended = [request for request in self.owned() if request.outcome is not None]
        self.take(ended)
        return ended

    def cancel(self, requests: Sequence[AssignedRequest]) -> None:
        """Strike out requests, ended or not."""
        self.take(requests)
        self._cancelled |= {request.number: request.engine for request in requests if request.outcome is None}

    def forget_cancelled(self, engines: Collection[int]) -> None:
        """Forget what was cancelled of these engines, which were replaced and will not answer it."""
        self._cancelled = {
            number: engine for number, engine in self._cancelled.items() if engine not in engines
        }


def num_unfinished(requests: Iterable[AssignedRequest]) -> Counter[int]:
    """Number of these requests that have not ended, by engine."""
    return Counter(request.engine for request in requests if request.outcome is None)


def _problem(outcome: Sample | str, engine: int) -> str | None:
    """The reason why an outcome is impossible, if it is."""
    if isinstance(outcome, str):
        return None
    who = f"rollout engine {engine} returned sample {outcome.number}"
    if not outcome.parts:
        return f"a response must have at least one token, but {who} without one"
    versions = [part.version for part in outcome.parts if isinstance(part, Part)]
    if UNKNOWN in versions:
        return f"every token must come from a known version of the weights, but {who} with tokens of none"
    return None
