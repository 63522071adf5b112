"""Add up facts that must be searched for, with a calculator: an environment without a state."""

import re
from collections.abc import Mapping
from typing import Any

from verl_rc.runtime.rollout.environment import Environment, Opening, Reply, Turn

USEFUL, RIGHT = 0.1, 1.0
"""Rewards of a turn that is useful (the first search for a name of the question, or its sum), and of the
right answer."""
NOTHING = "?"
"""Result of a search without a match."""


class Research(Environment):
    """The question is a sum of names and numbers, such as ``b+e+7``; the row has the number of each name.

    A turn that is a name searches for it, and a turn with a ``+`` goes to the calculator. Any other turn is
    the answer and ends the episode. The shortest episode has a turn for each name, one for the calculator and
    one for the answer. ``prompt`` of the row ends with the question, ``ground_truth`` is the sum, and
    ``extra_info.facts`` has a number for every name.
    """

    async def reset(self, row: Mapping[str, Any], seed: int) -> Opening | None:
        """See ``Environment``."""
        self._facts = dict(row["extra_info"]["facts"])
        self._answer = row["ground_truth"]
        terms = row["prompt"][-1]["content"].split("+")
        self._unknown = {term for term in terms if not term.isdecimal()}
        self._sum = sorted(int(self._facts.get(term, term)) for term in terms)
        return None

    async def step(self, turn: Turn) -> Reply:
        """See ``Environment``."""
        text = turn.text.strip()
        if text.isalpha():
            is_useful = text in self._unknown
            self._unknown.discard(text)
            return reply(str(self._facts.get(text, NOTHING)), is_useful)
        if re.fullmatch(r"\d+(\+\d+)+", text):
            numbers = sorted(map(int, text.split("+")))
            return reply(str(sum(numbers)), numbers == self._sum)
        is_right = text == self._answer
        return Reply(reward=RIGHT if is_right else 0.0, done=True, metrics={"acc": float(is_right)})

    def reply_roles(self) -> list[list[str]]:
        """See ``Environment``."""
        return [["tool"]]


def reply(content: str, is_useful: bool) -> Reply:
    """The reply of the search or the calculator."""
    return Reply([{"role": "tool", "content": content}], reward=USEFUL if is_useful else 0.0)
