"""The protocol of an environment: messages in, messages and rewards out; its state can be written down."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from verl_rc.config.user_code import import_attribute
from verl_rc.records.episode import Episode, Exchange, Message, Opening, Reply, Turn

__all__ = [
    "Environment",
    "Episode",
    "EpisodeFailedError",
    "Exchange",
    "Message",
    "Opening",
    "PolicyError",
    "Reply",
    "Turn",
    "environment_class",
]


class PolicyError(Exception):
    """The policy is at fault (an endless loop, a forbidden call): the episode ends and is trained on with
    this reward."""

    def __init__(self, why: str, reward: float = 0.0) -> None:
        super().__init__(why)
        self.reward = reward


class EpisodeFailedError(RuntimeError):
    """An environment has failed; the message names it and the turn. Its sample is not trained on."""


class Environment(ABC):
    """One episode. One method runs at a time, and may wait.

    Every sample of a prompt has an object of its own. After a loss or in a resumed run an episode may
    continue in another process: ``restore`` then gets the last ``state``. If that was None, ``reset`` and
    ``step`` are called with the same seed and turns, and must reply alike.
    """

    @abstractmethod
    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """Begin the episode; returns its prompt, or None for the prompt of the row.

        ``row`` of the data: see ``Episode.row``. Samples of one prompt get the same ``seed`` and must open
        alike.
        """

    @abstractmethod
    async def step(self, turn: Turn) -> Reply:
        """Answer a turn of the policy. Raises ``PolicyError`` when the policy is at fault; any other
        exception is a failure of the environment."""

    def __repr__(self) -> str:
        """Its name in messages."""
        return type(self).__name__

    def reply_roles(self) -> Sequence[Sequence[str]] | None:
        """The roles of the messages of a reply, for each kind of reply: ``[["user"]]``.

        The run refuses a chat template that cannot render them at its start. None: unknown, so a reply that
        the template cannot render fails its episode.
        """
        return None

    async def state(self) -> bytes | None:
        """The state for ``restore``, with that of random generators. None if the turns are replayed."""
        return None

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """Continue from ``state``, instead of ``reset``."""
        raise NotImplementedError(f"{type(self).__name__} has a state, so it must have a method restore.")

    async def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Free the resources of the episode; called once, also after a failure."""


def environment_class(name: str, arguments: Mapping[str, Any]) -> Callable[[], Environment]:
    """The constructor of the environments ``name`` (``module:Class``) with these ``arguments``.

    Tries it once. Raises ``ValueError`` with the fault.
    """
    key = "actor_rollout_ref.rollout.environment"
    kind = import_attribute(name, f"{key}.name={name}", "class")
    if not isinstance(kind, type) or not issubclass(kind, Environment):
        raise ValueError(
            f"{key}.name must be a verl_rc.runtime.rollout.environment.Environment, got {kind!r}."
        )
    make = partial(kind, **arguments)
    try:
        make()
    except ValueError:  # its message has the fault
        raise
    except Exception as error:  # such as a TypeError: a method is missing, or arguments do not fit
        raise ValueError(
            f"{key}.name={name} must be made by {key}.arguments={dict(arguments)}, but: {error!r}."
        ) from error
    return make
