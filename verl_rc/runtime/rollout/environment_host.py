"""A host: the open episodes of one process.

A host opens an episode on demand, from its state or its turns. So a lost host, a lost engine and a resumed
run are one case: the host does not know the episode.
"""

import asyncio
import reprlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.records.episode import BadReplyError, Episode, EpisodeKey, Opening, Reply, Turn
from verl_rc.runtime.distributed.event_loop import LateError, within
from verl_rc.runtime.rollout.environment import (
    Environment,
    EpisodeFailedError,
    PolicyError,
    environment_class,
)
from verl_rc.runtime.rollout.tool_environment import Toolbox, ToolEnvironment

T = TypeVar("T")
_MAX_CONCURRENT_RESETS = 32
"""A reset may start a process, and a step asks for all its episodes at once."""
_CLOSE_SECONDS = 5.0
_MIB = 1 << 20


@dataclass(frozen=True)
class StepResult:
    """The reply to a turn, and the environment's state after it."""

    reply: Reply
    state: bytes | None = None


@dataclass(frozen=True)
class NeedsHistory:
    """The episode is not open here and has no state: its turns must be sent."""


@dataclass(frozen=True)
class Failure:
    """The environment or its host has failed."""

    reason: str
    may_retry: bool
    """Whether the same turn, asked again from the episode's state or turns, may succeed."""


StepOutcome = StepResult | NeedsHistory | Failure


class Hosts(Protocol):
    """The interface of one or more hosts, in this process or in others."""

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """The opening of a row's episode, see ``Environment.reset``. Raises ``EpisodeFailedError``."""

    async def step(self, episode: Episode, turn: Turn) -> StepOutcome:
        """Answer a turn; a turn that was answered before gets the same reply."""

    async def close(self, key: EpisodeKey) -> None:
        """Close an episode, where it is open."""

    def count_lost(self) -> int:
        """Number of hosts that are known to be lost since the last call."""
        return 0


@dataclass(frozen=True)
class HostLimits:
    """Limits of time and memory for the environments of a host."""

    step_seconds: float | None = None
    """Time limit of each method call. None if the environment has limits of its own."""
    idle_seconds: float = 1800.0
    """An episode without a call for this long is closed; it can be opened again."""
    state_megabytes: float = 16.0
    """Largest state, MiB."""


@dataclass
class _Session:
    """An episode that is open on this host."""

    last_turn: int
    """Number of the last turn that was answered, -1 before the first."""
    last_result: StepResult | None = None
    """The result of that turn. None if another host has it."""
    environment: Environment | None = None
    """The environment. None until the first turn on this host."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used: float = 0.0
    """Time of the last call, by the event loop's clock."""


class Host:
    """The open episodes of this process; all methods run in one event loop."""

    def __init__(self, make: Callable[[Mapping[str, Any]], Environment], limits: HostLimits) -> None:
        """``make`` builds the environment of a row."""
        self._make = make
        self._limits = limits
        self._sessions: dict[EpisodeKey, _Session] = {}
        self._reset_slots = asyncio.Semaphore(_MAX_CONCURRENT_RESETS)

    def __len__(self) -> int:
        """Number of open episodes."""
        return len(self._sessions)

    async def open(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Hosts``."""
        try:
            environment = self._make(row)
            try:
                return await self._reset(environment, row, seed)
            finally:
                await self._close(environment)
        except (Exception, SystemExit) as error:
            raise EpisodeFailedError(f"the environment failed to open an episode: {error!r}") from error

    async def step(self, episode: Episode, turn: Turn) -> StepOutcome:
        """See ``Hosts``."""
        await self._close_idle()
        session = self._sessions.get(episode.key)
        if session is not None and session.last_turn not in (turn.number - 1, turn.number):
            await self.close(episode.key)  # its last turns went to another host
            session = None
        if session is None:
            if turn.number and episode.state is None and episode.history is None:
                return NeedsHistory()
            session = self._sessions[episode.key] = _Session(turn.number - 1)
        session.last_used = asyncio.get_running_loop().time()
        (outcome,) = await asyncio.gather(self._answer_turn(session, episode, turn), return_exceptions=True)
        if isinstance(outcome, BaseException):
            await self.close(episode.key)
            is_permanent = isinstance(outcome, EpisodeFailedError | BadReplyError)
            source = f"the environment, turn {turn.number} of episode {episode.key}"
            reason = f"{source}: {outcome if is_permanent else repr(outcome)}"
            return Failure(reason, may_retry=not is_permanent)
        if outcome.reply.ends or not turn.stopped:
            await self.close(episode.key)
        return outcome

    async def _answer_turn(self, session: _Session, episode: Episode, turn: Turn) -> StepResult:
        """The result of a turn, of its first call if it was answered before. Opens the environment first
        where this host has none."""
        async with session.lock:
            if session.environment is None:
                session.environment = self._make(episode.row)
                await self._restore_or_replay(session.environment, episode, turn.number)
            if session.last_turn != turn.number or session.last_result is None:
                session.last_result = await self._step(session.environment, turn)
                session.last_turn = turn.number
            return session.last_result

    async def close(self, key: EpisodeKey) -> None:
        """See ``Hosts``."""
        session = self._sessions.pop(key, None)
        if session is not None and session.environment is not None:
            await self._close(session.environment)

    async def _reset(self, environment: Environment, row: Mapping[str, Any], seed: int) -> Opening | None:
        async with self._reset_slots:
            return await self._call(environment.reset(row, seed), "reset", environment)

    async def _restore_or_replay(self, environment: Environment, episode: Episode, turn_number: int) -> None:
        """Bring the environment to its state before a turn."""
        if turn_number and episode.state is not None:
            restoration = environment.restore(episode.row, episode.seed, episode.state)
            await self._call(restoration, "restore", environment)
            return
        opening = await self._reset(environment, episode.row, episode.seed)
        if episode.opening is not None and opening != episode.opening:
            raise EpisodeFailedError(
                "reset must open alike for all samples of a prompt, but it gave "
                f"{reprlib.repr(episode.opening)} before, {reprlib.repr(opening)} now. Draw its random "
                "numbers from the seed of reset."
            )
        for exchange in (episode.history or ())[:turn_number]:
            reply = (await self._step(environment, exchange.turn)).reply
            if replace(reply, metrics={}) != replace(exchange.reply, metrics={}):
                raise EpisodeFailedError(
                    "an environment without a state must reply alike to the same turns, but to turn "
                    f"{exchange.turn.number} it replied {exchange.reply} before and {reply} now. Draw its "
                    "random numbers from the seed of reset, or write state and restore."
                )

    async def _step(self, environment: Environment, turn: Turn) -> StepResult:
        try:
            reply = await self._call(environment.step(turn), "step", environment)
        except PolicyError as error:
            return StepResult(Reply(reward=error.reward, done=True, metrics={"policy_errors": 1.0}))
        if not isinstance(reply, Reply):
            raise EpisodeFailedError(
                f"step must return a verl_rc.runtime.rollout.environment.Reply, got {reply!r}."
            )
        if reply.ends or not turn.stopped:
            return StepResult(reply)
        state = await self._call(environment.state(), "state", environment)
        if not isinstance(state, bytes | None):
            raise EpisodeFailedError(f"state must return bytes or None, got {type(state).__name__}.")
        if len(state or b"") > self._limits.state_megabytes * _MIB:
            raise EpisodeFailedError(
                "a state must have at most actor_rollout_ref.rollout.environment.max_state_megabytes="
                f"{self._limits.state_megabytes:g}, got {len(state or b'') / _MIB:.1f} MiB."
            )
        return StepResult(reply, state)

    async def _call(self, call: Awaitable[T], method: str, environment: Environment) -> T:
        """Await a call of an environment's method. Raises ``TimeoutError`` after ``step_seconds``."""
        try:
            return await within(self._limits.step_seconds, call)
        except LateError as error:
            raise TimeoutError(
                f"{environment!r}.{method} must return within "
                f"actor_rollout_ref.rollout.environment.step_seconds={self._limits.step_seconds:g}."
            ) from error

    async def _close_idle(self) -> None:
        oldest = asyncio.get_running_loop().time() - self._limits.idle_seconds
        for key, session in list(self._sessions.items()):
            # While this loop awaits, a session may be used again, or opened anew under its key.
            is_current = self._sessions.get(key) is session
            if is_current and session.last_used < oldest and not session.lock.locked():
                await self.close(key)

    async def _close(self, environment: Environment) -> None:
        """Close an environment; its failure must not hide why the episode ended."""
        await asyncio.gather(asyncio.wait_for(environment.close(), _CLOSE_SECONDS), return_exceptions=True)


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
    choices = {
        key: environment_class(choice.name, choice.arguments) for key, choice in config.choices.items()
    }

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
