"""Guess a secret number: an environment with a state, and a reward for every turn."""

import json
import random
from collections.abc import Mapping
from typing import Any

from verl_rc.runtime.rollout.environment import Environment, Opening, Reply, Turn

RIGHT, WRONG = 1.0, -0.1
"""Rewards of a turn."""
HIGH, LOW, NO_NUMBER = "h", "l", "?"
"""Hints after a guess that is too high, too low, or no number of the game."""
PROMPT = "guess"


class GuessNumber(Environment):
    """A secret number below ``numbers`` is to be guessed in at most ``turns`` guesses.

    The hint after a wrong guess says whether it was too high or too low, so bisection finds every secret in
    ``log2(numbers)`` turns, rounded up. The secret is drawn from the seed: samples of one prompt guess the
    same number.
    """

    def __init__(self, numbers: int = 10, turns: int = 4) -> None:
        self._numbers = numbers
        self._turns = turns

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening:
        """See ``Environment``."""
        self._secret = random.Random(seed).randrange(self._numbers)
        self._guesses = 0
        return Opening([{"role": "user", "content": PROMPT}])

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``. A game that a limit has ended is lost."""
        if not turn.token_ids:
            return Reply(done=True, metrics={"acc": 0.0, "guesses": float(self._guesses)})
        return self.guess(turn.text)

    def guess(self, text: str) -> Reply:
        """The reply to a guess."""
        self._guesses += 1
        text = text.strip()
        guess = int(text) if text.isdecimal() and int(text) < self._numbers else None
        if guess == self._secret:
            return Reply(reward=RIGHT, done=True, metrics={"acc": 1.0, "guesses": float(self._guesses)})
        if self._guesses == self._turns:
            return Reply(reward=WRONG, done=True, metrics={"acc": 0.0, "guesses": float(self._guesses)})
        hint = NO_NUMBER if guess is None else HIGH if guess > self._secret else LOW
        return Reply([{"role": "user", "content": hint}], reward=WRONG)

    def reply_roles(self) -> list[list[str]]:
        """See ``Environment``."""
        return [["user"]]

    async def state(self) -> bytes:
        """See ``Environment``."""
        return json.dumps([self._secret, self._guesses]).encode()

    async def restore(self, row: Mapping[str, Any], seed: int, state: bytes) -> None:
        """See ``Environment``."""
        self._secret, self._guesses = json.loads(state)
