"""Environments in processes of their own: the same episodes as in this one, also when a host is lost."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import ray

from verl_rc.config.rollout import EnvironmentConfig
from verl_rc.records.episode import Episode, Exchange, Reply, Turn
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Hosts, NeedsHistory, StepResult, environment_host
from verl_rc.trainer.cluster.environment_hosts import RayHosts

WRONG = [Turn(number, "x", (number,), True) for number in range(5)]


pytestmark = pytest.mark.usefixtures("ray_here")


def config(**arguments: object) -> EnvironmentConfig:
    return EnvironmentConfig(
        name="guessing:Guess", arguments={"max_turns": 5, **arguments}, hosts=2, step_seconds=1.0
    )


async def play(hosts: Hosts, number: int, lose: Sequence[int] = ()) -> list[Reply]:
    """The replies to an episode's turns; its host is lost before some of them."""
    at, history = Episode((number, 0, 0), {"ground_truth": ""}, number), list[Exchange]()
    for turn in WRONG:
        if turn.number in lose:
            assert isinstance(hosts, RayHosts)
            ray.kill(hosts._actors[number % 2], no_restart=False)
        outcome = await hosts.step(at, turn)
        if isinstance(outcome, NeedsHistory):
            outcome = await hosts.step(replace(at, history=history), turn)
        assert isinstance(outcome, StepResult), outcome
        history.append(Exchange(turn, outcome.reply))
        at = replace(at, state=outcome.state)
    return [one.reply for one in history]


@pytest.mark.parametrize("snapshot", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_hosts_reply_as_one_in_this_process_does_also_when_they_are_lost(snapshot: bool) -> None:
    async def both() -> None:
        here = environment_host(config(snapshot=snapshot))
        hosts = RayHosts.start(config(snapshot=snapshot))
        expected = [await play(here, number) for number in range(8)]
        assert await asyncio.gather(*(play(hosts, number) for number in range(8))) == expected
        assert await play(hosts, 10, lose=(1, 3)) == await play(here, 10)
        opening = await hosts.open({"ground_truth": "7"}, 3)
        assert opening is not None
        assert opening.messages == [{"role": "user", "content": "guess 7"}]

    asyncio.run(both())


def test_a_host_that_is_blocked_is_started_again() -> None:
    """The one who asks has no more patience; the next episode finds a host that works."""

    async def blocked() -> None:
        hosts = RayHosts.start(config(faults={"block": 1}).model_copy(update={"hosts": 1}))
        at = Episode((0, 0, 0), {}, 0)
        assert isinstance(await hosts.step(at, WRONG[0]), StepResult)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(hosts.step(at, WRONG[1]), 0.5)
        assert isinstance(await asyncio.wait_for(hosts.step(at, WRONG[0]), 30), StepResult)

    asyncio.run(blocked())


def test_hosts_that_were_lost_are_counted_once() -> None:
    hosts = RayHosts.start(config())
    asyncio.run(play(hosts, 0))
    asyncio.run(play(hosts, 1))
    assert hosts.count_lost() == 0
    ray.kill(hosts._actors[1], no_restart=False)
    deadline, lost = time.monotonic() + 60, 0
    while not lost and time.monotonic() < deadline:
        lost = hosts.count_lost()
    assert (lost, hosts.count_lost()) == (1, 0)


def test_an_opening_that_fails_is_an_error_with_its_cause() -> None:
    async def fails() -> None:
        hosts = RayHosts.start(EnvironmentConfig(name="guessing:Unlucky", hosts=1))
        with pytest.raises(EpisodeFailedError, match="no sandbox is left"):
            await hosts.open({}, 1)

    asyncio.run(fails())
