"""The guessing game as an agent: a loop of its own that asks the policy by the ``openai`` client.

A function (``recipes.environments.guess_agent:play``), and a process
(``python -m recipes.environments.guess_agent``).
"""

import asyncio
import json
import os
import sys
from functools import cache
from typing import Any

from openai import AsyncOpenAI

from recipes.environments.guess import GuessNumber
from verl_rc.runtime.rollout.environments.agent_task import AgentTask


async def play(task: AgentTask, numbers: int = 10, turns: int = 4) -> dict[str, Any]:
    """Guess until the game is over; returns the score."""
    game = GuessNumber(numbers, turns)
    client = _client(task.base_url).with_options(api_key=task.api_key)
    messages = [dict(message) for message in (await game.reset(task.row, task.seed)).messages]
    reward = 0.0
    for _ in range(turns):
        answer = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
        choice = answer.choices[0]
        text = choice.message.content or ""
        reply = game.guess(text)
        reward += reply.reward
        if reply.done or choice.finish_reason == "length":
            break
        messages += [{"role": "assistant", "content": text}, *(dict(message) for message in reply.messages)]
    return {"reward": reward, "metrics": dict(reply.metrics)}


@cache
def _client(base_url: str) -> AsyncOpenAI:
    """One client for all episodes: making one costs more than a call. No timeout: a turn may wait for new
    weights."""
    return AsyncOpenAI(base_url=base_url, api_key="of each episode", timeout=None)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(play(AgentTask.from_variables(os.environ)))))
