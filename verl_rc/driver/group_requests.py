"""The requests of groups to the engines, and the samples that they return."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from verl_rc.data.groups import Group, GroupSample
from verl_rc.data.parts import Part, Sample
from verl_rc.driver.services import Services
from verl_rc.rollout.sampling import GenerationRequest, SamplingOptions, request_seed


@dataclass(frozen=True)
class Taken:
    """The results of requests that have ended."""

    groups: frozenset[int]
    """Numbers of the groups that they belong to."""
    num_tokens: int
    failures: Mapping[int, str]
    """Why a sample failed, by the number of its group; the first where several did."""


class GroupRequests:
    """The requests that the engines work on, by the group and the place of the sample that each is for."""

    def __init__(self, services: Services, *, one_version: bool) -> None:
        """``one_version``: one version of the weights must sample all tokens of a response."""
        self._services = services
        self._one_version = one_version
        self._places: dict[int, tuple[int, int]] = {}
        """Number of the group and place of the sample there, by the engines' number of a request."""
        self._submitted_at: dict[int, float] = {}
        """When each group with requests under way was submitted, ``time.monotonic`` seconds."""

    def __len__(self) -> int:
        """Number of requests under way."""
        return len(self._places)

    def has_group(self, number: int) -> bool:
        """Whether a group was submitted and is not closed."""
        return number in self._submitted_at

    def requests_of(self, numbers: Collection[int]) -> list[int]:
        """The requests of these groups."""
        return [request for request, (group, _) in self._places.items() if group in numbers]

    def submit(self, groups: Sequence[Group], *, evenly: bool) -> None:
        """Request the unfinished samples of these groups, each from its known tokens on.

        ``evenly``: engines share the samples of one prompt where that balances their load.
        """
        rollout = self._services.config.actor_rollout_ref.rollout
        services = self._services
        options = SamplingOptions.for_training(rollout, services.stop_token_ids)
        unfinished = [
            (group, sample) for group in groups for sample in group.samples if sample.state != "ended"
        ]
        sampled = [(group, sample) for group, sample in unfinished if sample.index < rollout.n]
        seeds = [sample_seed(services.config.trainer.seed, group, sample.index) for group, sample in sampled]
        greedy = [(group, sample) for group, sample in unfinished if sample.index >= rollout.n]
        self._request(sampled, seeds, options, evenly)
        self._request(greedy, [0] * len(greedy), replace(options, temperature=0.0), evenly)
        self._submitted_at |= dict.fromkeys((group.number for group in groups), time.monotonic())

    def _request(
        self,
        samples: Sequence[tuple[Group, GroupSample]],
        seeds: Sequence[int],
        options: SamplingOptions,
        evenly: bool,
    ) -> None:
        if not samples:
            return
        requests = [
            GenerationRequest(
                group.row.prompt_token_ids, seed, parts=sample.turns, tool_calls=sample.tool_calls
            )
            for (group, sample), seed in zip(samples, seeds, strict=True)
        ]
        numbers = self._services.engines.submit(requests, options, evenly=evenly)
        places = [(group.number, sample.index) for group, sample in samples]
        self._places |= dict(zip(numbers, places, strict=True))

    def take(self, numbers: Sequence[int], groups: Mapping[int, Group]) -> Taken:
        """Store the results of these requests in the samples of ``groups``, except cancelled ones."""
        numbers = [number for number in numbers if number in self._places]
        failed = self._services.engines.take_failures(numbers)
        touched = frozenset(self._places[number][0] for number in numbers)
        ended = [number for number in numbers if number not in failed]
        num_tokens = 0
        for number, returned in zip(ended, self._services.engines.take(ended), strict=True):
            sample = self._sample(number, groups)
            known = sample.num_sampled
            end_sample(sample, returned, one_version=self._one_version)
            num_tokens += sample.num_sampled - known
        failures: dict[int, str] = {}
        for number, why in failed.items():
            failures.setdefault(self._places[number][0], why)
        for number in numbers:
            del self._places[number]
        return Taken(touched, num_tokens, failures)

    def take_parts(self, groups: Mapping[int, Group]) -> int:
        """Store the tokens so far of requests that a publication cut in the samples of ``groups``; returns
        the number of new tokens."""
        num_tokens = 0
        for number in self._places:
            sample = self._sample(number, groups)
            num_known = sample.num_sampled
            sample.turns, sample.tool_calls = self._services.engines.parts(number)
            num_tokens += sample.num_sampled - num_known
        return num_tokens

    def _sample(self, number: int, groups: Mapping[int, Group]) -> GroupSample:
        group, place = self._places[number]
        return groups[group].samples[place]

    def close(self, group: int) -> float:
        """Close a group that is whole; returns the seconds since it was submitted."""
        return time.monotonic() - self._submitted_at.pop(group)

    def late_groups(self, limit: float) -> list[int]:
        """Groups that were submitted more than ``limit`` seconds ago."""
        return [number for number, began in self._submitted_at.items() if time.monotonic() - began > limit]

    def cancel(self, group: int) -> None:
        """Cancel the running requests of a group."""
        requests = self.requests_of([group])
        for request in requests:
            del self._places[request]
        self._submitted_at.pop(group, None)
        if requests:
            self._services.engines.cancel(requests)


def end_sample(sample: GroupSample, returned: Sample, *, one_version: bool) -> None:
    """Store the whole response that an engine returned in the group's sample.

    Raises ``RuntimeError`` when ``one_version`` of the weights must have sampled all tokens that the sample
    lacks and did not. It lacks none when an update came while its tools were at work, and their answers left
    no room.
    """
    parts = [part for part in returned.parts if isinstance(part, Part)]
    ends = accumulate(len(part.token_ids) for part in parts)
    lacking = {part.version for part, end in zip(parts, ends, strict=True) if end > sample.num_sampled}
    if (one_version and len(lacking) > 1) or not (lacking or returned.tool_calls):
        versions = sorted({part.version for part in parts})
        source = "one version of the weights" if one_version else "the weights that the engine holds"
        raise RuntimeError(
            f"every response must come from {source}, but sample {sample.index} of group {sample.number} has "
            f"{sample.num_sampled} known tokens and comes back with tokens of {versions}: an engine took an "
            "update under a running response."
        )
    sample.turns = list(returned.parts)
    sample.tool_calls = returned.tool_calls
    sample.state = "ended"
    sample.finished = returned.finished
    sample.engine = returned.engine


def sample_seed(seed: int, group: Group, index: int) -> int:
    """The seed of one response to a group's prompt, the same in synchronous and asynchronous runs.

    ``seed`` is that of the run.
    """
    identity = {
        "seed": seed,
        "step": group.admitted_for_step,
        "epoch": group.epoch,
        "row": group.row.row_index,
        "sample": index,
    }
    return request_seed({**identity, "attempt": group.attempt} if group.attempt else identity)
