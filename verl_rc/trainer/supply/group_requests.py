"""The requests of groups to the engines, and the samples that they return."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from verl_rc.records.episode import Episode
from verl_rc.records.groups import Group, GroupSample
from verl_rc.records.parts import Part, Sample
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions, request_seed
from verl_rc.trainer.cluster.engine_group import EngineGroup
from verl_rc.trainer.cluster.engine_work import AssignedRequest


class GroupRequests:
    """The requests of groups to the engines, which keep the book of requests. A request's owner is the sample
    that it completes."""

    def __init__(
        self,
        engines: EngineGroup,
        options: SamplingOptions,
        num_sampled: int,
        seed: int,
        *,
        converses: bool = False,
    ) -> None:
        """``num_sampled``: samples of a group by ``options``; a further one is greedy. ``seed``: the run's.
        ``converses``: each sample is an episode of an environment."""
        self._engines = engines
        self._options = options
        self._num_sampled = num_sampled
        self._seed = seed
        self._converses = converses

    def __bool__(self) -> bool:
        """Whether requests are running."""
        return bool(self._engines.submitted())

    def requests_of(self, numbers: Collection[int]) -> list[AssignedRequest]:
        """The requests of these groups."""
        return [request for request in self._engines.submitted() if request.owner.number in numbers]

    def submit(self, groups: Sequence[Group], *, evenly: bool) -> None:
        """Request the unfinished samples of these groups; each continues after its known tokens.

        ``evenly``: engines share the samples of one prompt where that balances their load.
        """
        unfinished = [(group, sample) for group in groups for sample in group.samples if not sample.ended]
        for is_greedy in (False, True):
            samples = [
                (group, sample)
                for group, sample in unfinished
                if (sample.index >= self._num_sampled) == is_greedy
            ]
            options = replace(self._options, temperature=0.0) if is_greedy else self._options
            requests = [
                GenerationRequest(
                    group.row.prompt_token_ids,
                    0 if is_greedy else sample_seed(self._seed, group, sample.index),
                    so_far=sample.response,
                    episode=self._episode(group, sample) if self._converses else None,
                    pictures=group.row.pictures,
                )
                for group, sample in samples
            ]
            if requests:
                owners = [sample for _, sample in samples]
                self._engines.submit(requests, options, owners=owners, evenly=evenly)

    def _episode(self, group: Group, sample: GroupSample) -> Episode:
        key = group.number, sample.index, group.attempt
        seed = environment_seed(self._seed, group)
        return Episode(key, group.row.for_environment(), seed, group.row.opening)

    def take_parts(self) -> int:
        """Store the tokens of requests that a publication cut in their samples; returns the number of new
        tokens."""
        num_tokens = 0
        for request in self._engines.submitted():
            num_known = request.owner.num_sampled
            request.owner.response = request.queued.request.so_far
            num_tokens += request.owner.num_sampled - num_known
        return num_tokens

    def cancel(self, group: int) -> None:
        """Cancel the running requests of a group."""
        requests = self.requests_of([group])
        if requests:
            self._engines.cancel(requests)


def store_response(sample: GroupSample, response: Sample, *, single_version: bool) -> int:
    """Store the whole response that an engine returned in the group's sample; returns the number of new
    tokens.

    Raises ``RuntimeError`` when new tokens come from several versions of the weights and ``single_version``
    forbids it, or when there are none. A response without new tokens is complete only where an environment
    ended it after an update.
    """
    num_known = sample.num_sampled
    parts = [part for part in response.parts if isinstance(part, Part)]
    ends = accumulate(len(part.token_ids) for part in parts)
    new_versions = {part.version for part, end in zip(parts, ends, strict=True) if end > num_known}
    if (single_version and len(new_versions) > 1) or not (new_versions or response.replies):
        versions = sorted({part.version for part in parts})
        source = "one version of the weights" if single_version else "the weights that the engine holds"
        raise RuntimeError(
            f"every response must come from {source}, but sample {sample.index} of group {sample.number} has "
            f"{num_known} known tokens and comes back with tokens of {versions}: an engine took an "
            "update under a running response."
        )
    sample.response, sample.ended = response, True
    return sample.num_sampled - num_known


def sample_seed(seed: int, group: Group, index: int) -> int:
    """The seed of one response to a group's prompt, the same in synchronous and asynchronous runs; ``seed``
    is the run's."""
    return request_seed({**_identity(seed, group), "sample": index})


def environment_seed(seed: int, group: Group) -> int:
    """The seed of the environments of a group's samples, which open alike."""
    return request_seed({**_identity(seed, group), "environment": 0})


def _identity(seed: int, group: Group) -> dict[str, int]:
    identity = {
        "seed": seed,
        "step": group.admitted_for_step,
        "epoch": group.epoch,
        "row": group.row.row_index,
    }
    return {**identity, "attempt": group.attempt} if group.attempt else identity
