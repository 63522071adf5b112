"""An environment of verifiers is an agent: its seat's turns are the policy's, its reward is the score."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_rc.records.episode import Episode, Opening, Turn
from verl_rc.runtime.rollout.environment import Reply, environment_class
from verl_rc.runtime.rollout.environment_host import Host, HostLimits, StepResult

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
AGENT = "verl_rc.runtime.rollout.environments.verifiers_agent"
ENVIRONMENT = {"taskset": {"id": "taskset_of_verifiers"}}
ROW = {"extra_info": {"index": 2}}


@pytest.mark.parametrize(
    "how",
    [
        {"function": f"{AGENT}:play", "arguments": {"environment": ENVIRONMENT}},
        {"command": [sys.executable, "-m", AGENT, json.dumps(ENVIRONMENT)]},
    ],
)
def test_turns_are_the_policys_and_the_reward_is_the_score(
    how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[4]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    make = environment_class("verl_rc.runtime.rollout.environments.agent:Agent", how)

    async def episode() -> tuple[Opening | None, list[Any]]:
        host, at = Host(lambda _: make(), HostLimits(step_seconds=60)), Episode((0, 0, 0), ROW, 5)
        opening = await host.open(ROW, 5)
        turns = [Turn(number, text, (number,), True) for number, text in enumerate(["x", "h"])]
        return opening, [await host.step(at, turn) for turn in turns]

    opening, outcomes = asyncio.run(episode())
    assert opening is not None
    system, asked = opening.messages
    assert (system, asked["role"], asked["content"][:5]) == (
        {"role": "system", "content": "speak"},
        "user",
        "say 2",
    )
    assert outcomes == [
        StepResult(Reply([{"role": "user", "content": "again"}])),
        StepResult(Reply(reward=1.0, done=True, metrics={"branches": 0.0})),
    ]


def test_an_episode_whose_turns_a_limit_ends_has_its_score() -> None:
    how = {"function": f"{AGENT}:play", "arguments": {"environment": ENVIRONMENT}}
    make = environment_class("verl_rc.runtime.rollout.environments.agent:Agent", how)

    async def episode() -> list[Any]:
        host, at = Host(lambda _: make(), HostLimits(step_seconds=60)), Episode((0, 0, 0), ROW, 5)
        given = [Turn(0, "h", (1,), True), Turn(1, "", (), stopped=False)]
        return [await host.step(at, turn) for turn in given]

    *_, last = asyncio.run(episode())
    assert last == StepResult(Reply(reward=1.0, done=True, metrics={"branches": 0.0}))
