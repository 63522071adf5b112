"""Environments in processes of their own: Ray actors, each a host of many episodes."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError

from verl_rc.config.rollout import EnvironmentConfig
from verl_rc.records.episode import Episode, EpisodeKey, Opening, Turn
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Failure, Hosts, StepOutcome

_MOST_LOSSES = 3
"""Hosts that a call may lose before it fails; until then Ray makes it again on the host that it starts."""
_NAME_SECONDS = 0.1
_MOST_CALLS = 10_000
"""Calls of one host at the same time: they wait for environments, not for each other."""


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=_MOST_LOSSES, max_concurrency=_MOST_CALLS)
class _HostProcess:
    """A Ray actor with one host. Ray pickles the class by value, so that it imports what it needs itself."""

    def __init__(self, config: EnvironmentConfig) -> None:
        from verl_rc.runtime.rollout.environment_host import environment_host  # noqa: PLC0415  (see the class)

        self._host = environment_host(config)
        self._process = uuid.uuid4().hex, ray.get_runtime_context().was_current_actor_reconstructed

    async def process(self) -> tuple[str, bool]:
        """A name that no other process has, and whether it took the place of one that was lost."""
        return self._process

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._host, method)(*arguments)


class RayHosts(Hosts):
    """Hosts in other processes; an episode stays with one of them.

    A host that is lost is started again by Ray and knows nothing: its episodes are opened anew, from their
    state or turns. One that does not answer in time, because an environment blocks it, is lost, too.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = list(actors)
        self._processes: dict[int, str] = {}
        """The names of the last processes that were seen, by place."""
        self._asked: dict[int, Any] = {}
        """Their names to come."""

    @classmethod
    def start(cls, config: EnvironmentConfig) -> "RayHosts":
        """Start ``environment.hosts`` processes."""
        return cls([_HostProcess.remote(config) for _ in range(config.hosts)])  # type: ignore[attr-defined]

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Hosts``."""
        outcome: Opening | Failure | None = await self._call(seed, "open", row, seed)
        if isinstance(outcome, Failure):
            raise EpisodeFailedError(outcome.reason)
        return outcome

    async def step(self, episode: Episode, turn: Turn) -> StepOutcome:
        """See ``Hosts``."""
        outcome: StepOutcome = await self._call(sum(episode.key), "step", episode, turn)
        return outcome

    async def close(self, key: EpisodeKey) -> None:
        """See ``Hosts``."""
        await self._call(sum(key), "close", key)

    def count_lost(self) -> int:
        """See ``Hosts``. A host that is busy, or still starts, says at a later call that it is another
        one."""
        for place, actor in enumerate(self._actors):
            if place not in self._asked:
                self._asked[place] = actor.process.remote()
        names = list(self._asked.values())
        ready, _ = ray.wait(names, num_returns=len(names), timeout=_NAME_SECONDS)
        lost = 0
        for place in [place for place, name in self._asked.items() if name in ready]:
            try:
                name, replaces_one = ray.get(self._asked.pop(place))
            except RayActorError:
                continue
            lost += self._processes.get(place, name) != name or (
                place not in self._processes and replaces_one
            )
            self._processes[place] = name
        return lost

    async def _call(self, place: int, method: str, *arguments: Any) -> Any:
        actor = self._actors[place % len(self._actors)]
        try:
            return await actor.call.remote(method, *arguments)
        except RayActorError as error:
            return Failure(
                f"hosts of environments died {1 + _MOST_LOSSES} times in a row: {error}", may_retry=False
            )
        except asyncio.CancelledError:  # who asked has no more patience
            ray.kill(actor, no_restart=False)
            raise
