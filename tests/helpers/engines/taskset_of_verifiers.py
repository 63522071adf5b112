"""A taskset for verifiers: the policy speaks twice, and is rewarded for every word ``h``."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["TwiceEnv", "TwiceTaskset"]


class TwiceTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass


class TwiceTaskset(vf.Taskset[TwiceTask, vf.TasksetConfig]):
    def load(self) -> Iterator[TwiceTask]:
        for number in range(3):
            yield TwiceTask(vf.TaskData(prompt=f"say {number}", system_prompt="speak"), self.config.task)


class TwiceConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()


class TwiceEnv(vf.Env[TwiceConfig]):
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.speaker.interaction(task) as speaking:
            first = await speaking.turn()
            second = await speaking.turn("again")
        said = [first.last_reply, second.last_reply]
        speaking.trace.record_reward("h", float(said.count("h")), 1.0)
