"""Book-keeping of samples: the engine of each unfinished sample, and finished samples until they are
taken."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count, groupby

from verl_rc.data.parts import UNKNOWN, Answer, Part, Sample
from verl_rc.rollout.engine import Collected, Interrupted, QueuedSample
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.rollout.tools import ToolFailedError


def assign(prompts: Sequence[Sequence[int]], unfinished: Sequence[int], evenly: bool) -> list[list[int]]:
    """Assign requests to engines: those of one prompt together, to the engine with the fewest unfinished
    samples.

    Args:
        prompts: Token ids of each request's prompt; requests with the same prompt are adjacent, and an engine
            computes it once.
        unfinished: Samples that each engine has already.
        evenly: Split requests of one prompt when they would give an engine more than its share of all
            unfinished samples.

    Returns:
        The indices of each engine's requests.
    """
    load = list(unfinished)
    limit = -(-(sum(load) + len(prompts)) // len(load)) if evenly else sum(load) + len(prompts)
    assignment: list[list[int]] = [[] for _ in load]
    for _, group in groupby(range(len(prompts)), key=prompts.__getitem__):
        positions = list(group)
        while positions:
            engine = load.index(min(load))
            head = positions[: limit - load[engine]]
            assignment[engine] += head
            load[engine] += len(head)
            positions = positions[len(head) :]
    return assignment


class EngineWork:
    """The samples of all engines by unique number, from their assignment until they are taken."""

    def __init__(self, num_engines: int, by_seed: bool = False) -> None:
        """``by_seed``: a sample's engine follows from its seed, also in a resumed run; else from how busy the
        engines are."""
        self._by_seed = by_seed
        self._numbers = count()
        self._unfinished: list[dict[int, QueuedSample]] = [{} for _ in range(num_engines)]
        self._discarded: set[int] = set()
        """Numbers of samples without a reader any more, which their engine may still return."""
        self._ended: dict[int, Sample] = {}
        """Samples that have ended, by number."""
        self._failures: dict[int, str] = {}
        """Why samples that have ended have no response, by number."""

    def add(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions, *, awaited: bool, evenly: bool
    ) -> tuple[list[int], dict[int, list[QueuedSample]]]:
        """Assign requests; returns their numbers, in order, and the samples for each engine.

        ``awaited``: the caller waits for all of them, so they run before samples without a waiter.
        ``evenly``: see ``assign``.
        """
        samples = [QueuedSample(next(self._numbers), request, options, awaited) for request in requests]
        if self._by_seed:
            engine_of = [request.seed % len(self._unfinished) for request in requests]
            assignment = [
                [place for place, assigned in enumerate(engine_of) if assigned == engine]
                for engine in range(len(self._unfinished))
            ]
        else:
            prompts = [request.prompt_token_ids for request in requests]
            assignment = assign(prompts, [len(unfinished) for unfinished in self._unfinished], evenly)
        samples_by_engine = {
            engine: [samples[position] for position in positions]
            for engine, positions in enumerate(assignment)
            if positions
        }
        for engine, unfinished in samples_by_engine.items():
            self._unfinished[engine] |= {sample.number: sample for sample in unfinished}
        return [sample.number for sample in samples], samples_by_engine

    def add_to_each(
        self, requests: Sequence[GenerationRequest], options: SamplingOptions
    ) -> tuple[list[list[int]], dict[int, list[QueuedSample]]]:
        """Assign all requests to every engine; returns numbers and samples by engine.

        The numbers are below all others, so that these samples begin first.
        """
        samples_by_engine: dict[int, list[QueuedSample]] = {}
        for engine, unfinished in enumerate(self._unfinished):
            samples_by_engine[engine] = [
                QueuedSample(-1 - next(self._numbers), request, options) for request in requests
            ]
            unfinished |= {sample.number: sample for sample in samples_by_engine[engine]}
        return [
            [sample.number for sample in samples] for samples in samples_by_engine.values()
        ], samples_by_engine

    def unfinished(self, engine: int) -> list[QueuedSample]:
        """The unfinished samples of an engine, in the order of their numbers."""
        return [self._unfinished[engine][number] for number in sorted(self._unfinished[engine])]

    def num_busy(self) -> dict[int, int]:
        """The number of unfinished samples of each engine that has some."""
        return {engine: len(mine) for engine, mine in enumerate(self._unfinished) if mine}

    def num_unfinished(self, numbers: Sequence[int]) -> dict[int, int]:
        """The number of unfinished samples among ``numbers``, for each engine that has some."""
        counts = {
            engine: sum(number in unfinished for number in numbers)
            for engine, unfinished in enumerate(self._unfinished)
        }
        return {engine: count for engine, count in counts.items() if count}

    def record(self, answers: Mapping[int, Collected]) -> None:
        """Store the finished samples of each engine, without discarded ones.

        Raises ``RuntimeError`` when an engine returns a sample that it does not have, or one that cannot be;
        all others are stored.
        """
        problems = []
        for engine, collected in answers.items():
            unfinished = self._unfinished[engine]
            outcomes: list[tuple[int, Sample | str]] = [
                (sample.number, sample) for sample in collected.samples
            ]
            outcomes += collected.failures.items()
            for number, outcome in outcomes:
                if number in self._discarded:
                    self._discarded.remove(number)
                elif number not in unfinished:
                    problems.append(
                        f"rollout engine {engine} must return each of its samples once, but sample {number} "
                        "is none of those that it still has"
                    )
                elif isinstance(outcome, str):
                    self._failures[number] = outcome
                    del unfinished[number]
                elif problem := _problem(outcome, engine):
                    problems.append(problem)
                else:
                    has_several = len(self._unfinished) > 1
                    self._ended[number] = replace(outcome, engine=engine) if has_several else outcome
                    del unfinished[number]
        if problems:
            raise RuntimeError(f"{problems[0]}. Its samples cannot be trained on.")

    def record_parts(self, answers: Mapping[int, Interrupted]) -> None:
        """Note how far each engine had come with unfinished samples at its last update: another engine
        continues from there."""
        for engine, interrupted in answers.items():
            unfinished = self._unfinished[engine]
            for sample in interrupted.samples:
                if sample.number in unfinished:
                    request = unfinished[sample.number].request
                    request = replace(request, parts=sample.parts, tool_calls=sample.tool_calls)
                    unfinished[sample.number] = replace(unfinished[sample.number], request=request)

    def parts(self, number: int) -> tuple[list[Part | Answer], int]:
        """Return what is known of an unfinished sample's response, and the number of its calls that tools
        answered."""
        (sample,) = (unfinished[number] for unfinished in self._unfinished if number in unfinished)
        return list(sample.request.parts), sample.request.tool_calls

    def finished(self) -> list[int]:
        """The numbers of finished samples that were not taken, in ascending order."""
        return sorted([*self._ended, *self._failures])

    def take_failures(self, numbers: Sequence[int]) -> dict[int, str]:
        """Remove those of these samples that failed; returns why, by number."""
        return {number: self._failures.pop(number) for number in numbers if number in self._failures}

    def take(self, numbers: Sequence[int]) -> list[Sample]:
        """Remove finished samples and return them in this order. Raises ``ToolFailedError`` when one
        failed."""
        for why in self.take_failures(numbers).values():
            raise ToolFailedError(why)
        return [self._ended.pop(number) for number in numbers]

    def discard(self, numbers: Sequence[int]) -> None:
        """Drop samples, finished or not."""
        self.take_failures(numbers)
        for number in numbers:
            self._ended.pop(number, None)
            if any(unfinished.pop(number, None) is not None for unfinished in self._unfinished):
                self._discarded.add(number)


def _problem(sample: Sample, engine: int) -> str | None:
    """Why a sample cannot be, if it cannot."""
    who = f"rollout engine {engine} returned sample {sample.number}"
    if not sample.parts:
        return f"a response must have at least one token, but {who} without one"
    versions = [part.version for part in sample.parts if isinstance(part, Part)]
    if UNKNOWN in versions:
        return f"every token must come from a known version of the weights, but {who} with tokens of none"
    return None
