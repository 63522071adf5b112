"""Text games with the methods of Gymnasium, as environments."""

from collections.abc import Mapping
from numbers import Real
from typing import Any

from verl_rc.config.user_code import import_attribute
from verl_rc.runtime.rollout.environment import Environment, Opening, Reply, Turn


class Gym(Environment):
    """A class with ``reset(seed=, options=)``, which returns an observation and a dict, and ``step(action)``,
    which returns an observation, a reward, terminated, truncated and a dict.

    Observations and actions are texts; ``options`` is the row of the data. Numbers of the dict are metrics.
    An episode is replayed by its turns, so the game must draw its random numbers from ``seed``.
    """

    def __init__(self, game: str, **arguments: Any) -> None:
        """``game``: ``module:Class``, made with ``arguments``. Raises ``ValueError`` when there is none."""
        key = f"actor_rollout_ref.rollout.environment.arguments.game={game}"
        self._game = import_attribute(game, key, "class")(**arguments)

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """See ``Environment``."""
        observation, _ = self._game.reset(seed=seed, options=dict(row))
        return Opening([{"role": "user", "content": str(observation)}])

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. A turn without tokens is no action."""
        if not turn.token_ids:
            return Reply(truncated=True)
        observation, reward, terminated, truncated, facts = self._game.step(turn.text)
        numbers = {name: float(value) for name, value in facts.items() if isinstance(value, Real)}
        messages = [{"role": "user", "content": str(observation)}]
        return Reply(messages, float(reward), bool(terminated), bool(truncated), numbers)

    def reply_roles(self) -> list[list[str]]:
        """See ``Environment``."""
        return [["user"]]

    async def close(self) -> None:
        """See ``Environment``."""
        self._game.close()
