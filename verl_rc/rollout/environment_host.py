"""A host: the open episodes of one process.

An episode is opened on demand, from its state or its turns. So a lost host, a lost engine and a resumed run
are one thing: a host that does not know the episode.
"""

import asyncio
import reprlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.data.episode import BadReplyError, Episode, EpisodeKey, Opening, Reply, Turn
from verl_rc.rollout.environment import Environment, EpisodeFailedError, PolicyError, environment_class
from verl_rc.rollout.tool_environment import Toolbox, ToolEnvironment

T = TypeVar("T")
_OPENED_AT_ONCE = 32
"""Episodes that a host opens at the same time: one may start a process, and all of a step come at once."""
_CLOSE_SECONDS = 5.0
_MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Answered:
    """The reply to a turn, and the environment's state after it."""

    reply: Reply
    state: bytes | None = None


@dataclass(frozen=True)
class NeedsHistory:
    """The episode is not open here and has no state: its turns must be sent."""


@dataclass(frozen=True)
class Failed:
    """There is no reply."""

    why: str
    again: bool
    """Whether asking once more, from the episode's state or turns, may succeed."""


Outcome = Answered | NeedsHistory | Failed


class Hosts(Protocol):
    """Hosts as those see them who ask: here, or in other processes."""

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """What an episode of a row opens with, see ``Environment.reset``. Raises ``EpisodeFailedError``."""

    async def step(self, episode: Episode, turn: Turn) -> Outcome:
        """Answer a turn. One that was answered already gets the same reply."""

    async def close(self, key: EpisodeKey) -> None:
        """Forget an episode, where it is open."""

    def count_lost(self) -> int:
        """How many hosts were lost since the last call, as far as that is known."""
        return 0


@dataclass(frozen=True)
class HostLimits:
    """What an environment may take."""

    step_seconds: float | None = None
    """Of each of its methods; None: it has limits of its own."""
    idle_seconds: float = 1800.0
    """An episode that nobody asks for so long is closed; it can be opened again."""
    state_megabytes: float = 16.0


@dataclass
class _Open:
    """An episode that is open here."""

    number: int
    """Of the last turn that was answered; -1: none."""
    answer: Answered | None = None
    """To that turn; None: it was given elsewhere."""
    environment: Environment | None = None
    """None: it is still to be made."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used: float = 0.0
    """When it was last asked for, by the loop's clock."""


class Host:
    """The open episodes of this process; all methods run in one event loop."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Environment], limits: HostLimits) -> None:
        """``make`` builds the environment of a row."""
        self._make = make
        self._limits = limits
        self._open: dict[EpisodeKey, _Open] = {}
        self._opening = asyncio.Semaphore(_OPENED_AT_ONCE)
        self.counts: Counter[str] = Counter()
        """How often an episode was begun, restored, replayed, failed, failed to close, and a reply repeated.
        """

    def __len__(self) -> int:
        """Number of open episodes."""
        return len(self._open)

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Hosts``."""
        one = _Open(-1)
        try:
            one.environment = self._make(row)
            return await self._reset(one.environment, row, seed)
        except Exception as error:
            raise EpisodeFailedError(f"the environment failed to open an episode: {error!r}") from error
        finally:
            if one.environment is not None:
                await self._close(one.environment)

    async def step(self, episode: Episode, turn: Turn) -> Outcome:
        """See ``Hosts``."""
        await self._close_idle()
        one = self._open.get(episode.key)
        if one is not None and one.number not in (turn.number - 1, turn.number):
            await self.close(episode.key)  # its last turns went to another host
            one = None
        if one is None and turn.number and episode.state is None and episode.history is None:
            return NeedsHistory()
        if one is None:
            one = self._open[episode.key] = _Open(turn.number - 1)
        one.used = asyncio.get_running_loop().time()
        (outcome,) = await asyncio.gather(self._advance(one, episode, turn), return_exceptions=True)
        if isinstance(outcome, BaseException):
            self.counts["failed"] += 1
            await self.close(episode.key)
            is_final = isinstance(outcome, EpisodeFailedError | BadReplyError)
            where = f"the environment, turn {turn.number} of episode {episode.key}"
            return Failed(f"{where}: {outcome if is_final else repr(outcome)}", again=not is_final)
        if outcome.reply.ends or not turn.stopped:
            await self.close(episode.key)
        return outcome

    async def _advance(self, one: _Open, episode: Episode, turn: Turn) -> Answered:
        """The answer to a turn: that of before, or of the environment, which is opened first if need be."""
        async with one.lock:
            if one.environment is None:
                one.environment = self._make(episode.row)
                await self._begin(one.environment, episode, turn.number)
            if one.number == turn.number and one.answer is not None:
                self.counts["repeated"] += 1
            else:
                one.answer = await self._answer(one.environment, turn)
                one.number = turn.number
            return one.answer

    async def close(self, key: EpisodeKey) -> None:
        """See ``Hosts``."""
        one = self._open.pop(key, None)
        if one is not None and one.environment is not None:
            await self._close(one.environment)

    async def _reset(self, environment: Environment, row: Mapping[str, Any], seed: int) -> Opening | None:
        async with self._opening:
            return await self._limited(environment.reset(row, seed), "reset", environment)

    async def _begin(self, environment: Environment, episode: Episode, number: int) -> None:
        """Bring the environment to where it was before turn ``number``."""
        if number and episode.state is not None:
            self.counts["restored"] += 1
            restoring = environment.restore(episode.row, episode.seed, episode.state)
            await self._limited(restoring, "restore", environment)
        else:
            self.counts["replayed" if number else "begun"] += 1
            opening = await self._reset(environment, episode.row, episode.seed)
            if episode.opening is not None and opening != episode.opening:
                raise EpisodeFailedError(
                    "reset must open alike for all samples of a prompt, but it gave "
                    f"{reprlib.repr(episode.opening)} before, {reprlib.repr(opening)} now. Draw its random "
                    "numbers from the seed of reset."
                )
            for past in (episode.history or ())[:number]:
                reply = (await self._answer(environment, past.turn)).reply
                if replace(reply, metrics={}) != replace(past.reply, metrics={}):
                    raise EpisodeFailedError(
                        "an environment without a state must reply alike to the same turns, but to turn "
                        f"{past.turn.number} it replied {past.reply} before and {reply} now. Draw its random "
                        "numbers from the seed of reset, or write state and restore."
                    )

    async def _answer(self, environment: Environment, turn: Turn) -> Answered:
        try:
            reply = await self._limited(environment.step(turn), "step", environment)
        except PolicyError as error:
            return Answered(Reply(reward=error.reward, done=True, metrics={"policy_errors": 1.0}))
        if not isinstance(reply, Reply):
            raise EpisodeFailedError(f"step must return a verl_rc.rollout.environment.Reply, got {reply!r}.")
        if reply.ends or not turn.stopped:
            return Answered(reply)
        state = await self._limited(environment.state(), "state", environment)
        if not isinstance(state, bytes | None):
            raise EpisodeFailedError(f"state must return bytes or None, got {type(state).__name__}.")
        if len(state or b"") > self._limits.state_megabytes * _MEGABYTE:
            raise EpisodeFailedError(
                "a state must have at most actor_rollout_ref.rollout.environment.max_state_megabytes="
                f"{self._limits.state_megabytes:g}, got {len(state or b'') / _MEGABYTE:.1f} MiB."
            )
        return Answered(reply, state)

    async def _limited(self, call: Awaitable[T], method: str, environment: Environment) -> T:
        alone = asyncio.gather(call, return_exceptions=True)  # it may raise a TimeoutError of its own
        try:
            (outcome,) = await asyncio.wait_for(alone, self._limits.step_seconds)
        except asyncio.TimeoutError as error:
            raise TimeoutError(
                f"{environment!r}.{method} must return within "
                f"actor_rollout_ref.rollout.environment.step_seconds={self._limits.step_seconds:g}."
            ) from error
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def _close_idle(self) -> None:
        oldest = asyncio.get_running_loop().time() - self._limits.idle_seconds
        for key, one in list(self._open.items()):
            # Looked at now: while others were closed, it may have been asked for, or opened again.
            if one.used < oldest and not one.lock.locked() and self._open.get(key) is one:
                await self.close(key)

    async def _close(self, environment: Environment) -> None:
        closing = asyncio.wait_for(environment.close(), _CLOSE_SECONDS)
        (problem,) = await asyncio.gather(closing, return_exceptions=True)
        if problem is not None:  # it must not hide why the episode ended
            self.counts["failed to close"] += 1


def open_host(config: RolloutConfig) -> Host:
    """The host of a run's tools or environment. Raises ``ValueError`` when they cannot be made."""
    if config.environment.name is not None:
        return environment_host(config.environment)
    toolbox = Toolbox(config.multi_turn)
    return Host(lambda _: ToolEnvironment(toolbox), HostLimits())


def environment_host(config: EnvironmentConfig) -> Host:
    """The host of a run's environment. Raises ``ValueError`` when it cannot be made."""
    assert config.name is not None
    default = environment_class(config.name, config.arguments)
    choices = {key: environment_class(one.name, one.arguments) for key, one in config.choices.items()}

    def make(row: Mapping[str, Any]) -> Environment:
        name = row.get("agent_name")
        if name is None or not choices:
            return default()
        if name not in choices:
            raise EpisodeFailedError(
                "the column agent_name must name one of actor_rollout_ref.rollout.environment.choices="
                f"{sorted(choices)}, got {name!r}."
            )
        return choices[name]()

    return Host(make, HostLimits(config.step_seconds, state_megabytes=config.max_state_megabytes))
