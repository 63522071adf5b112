"""Agents from outside: what they ask is the prompt and the replies, how they end is the reward, and what they
may not do is refused by name."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import agents_of_a_user
import pytest

from verl_rc.records.episode import Episode, Exchange, Opening, Turn
from verl_rc.runtime.rollout.environment import EpisodeFailedError, Reply, environment_class
from verl_rc.runtime.rollout.environment_host import (
    Failure,
    Host,
    HostLimits,
    NeedsHistory,
    StepOutcome,
    StepResult,
)
from verl_rc.runtime.rollout.environments import agent as agent_module
from verl_rc.runtime.rollout.environments.agent import Agent
from verl_rc.runtime.rollout.environments.chat import ChatCall, RefusedCallError

T = TypeVar("T")
PLAY = "agents_of_a_user:play"
USER = Path(agents_of_a_user.__file__)
COMMAND = [sys.executable, str(USER)]
STUBBORN = [*COMMAND, '{"stubborn": 9}']
"""Does not end when its calls fail."""
ASKED = [{"role": "user", "content": "guess 7"}]
H = [{"role": "user", "content": "h"}]
SAID = {"role": "assistant", "content": "4"}
LIMITS = HostLimits(step_seconds=20)


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def host_of(limits: HostLimits = LIMITS, **arguments: Any) -> Host:
    make = environment_class("verl_rc.runtime.rollout.environments.agent:Agent", arguments)
    return Host(lambda _: make(), limits)


def playing(faults: Mapping[str, int] = {}, turns: int = 2, limits: HostLimits = LIMITS) -> Host:
    return host_of(limits, function=PLAY, arguments={"turns": turns, "faults": faults})


def episode(number: int = 3, **facts: Any) -> Episode:
    return Episode((number, 1, 0), {"ground_truth": "7"}, 5, **facts)


def turn(number: int, text: str = "4", **facts: Any) -> Turn:
    return replace(Turn(number, text, (number,), True), **facts)


async def outcomes(host: Host, turns: int) -> list[StepOutcome]:
    """Of so many turns, or fewer if the episode ends."""
    given: list[StepOutcome] = []
    while len(given) < turns:
        given.append(await host.step(episode(), turn(len(given))))
        if not isinstance(given[-1], StepResult) or given[-1].reply.ends:
            break
    return given


def replies(given: list[StepOutcome]) -> list[Reply]:
    assert all(isinstance(one, StepResult) for one in given), given
    return [one.reply for one in given if isinstance(one, StepResult)]


def why_failed(host: Host, turns: int = 1) -> str:
    *_, last = run(outcomes(host, turns))
    assert isinstance(last, Failure)
    return last.reason


@pytest.mark.parametrize("how", [{"function": PLAY}, {"command": COMMAND}])
def test_an_agent_opens_replies_and_is_rewarded(how: dict[str, Any]) -> None:
    host = host_of(**how)

    async def whole() -> tuple[Opening | None, list[StepOutcome]]:
        return await host.open({"ground_truth": "7"}, 5), await outcomes(host, 2)

    opening, given = run(whole())
    assert opening == Opening(ASKED, [])
    assert replies(given) == [Reply(H), Reply(reward=2.0, done=True, metrics={"branches": 0.0})]
    assert len(host) == 0


def test_it_goes_on_elsewhere_from_its_turns() -> None:
    async def moved() -> list[StepOutcome]:
        first, second = playing(turns=3), playing(turns=3)
        known = await outcomes(first, 2)
        opened = episode(opening=Opening(ASKED, []))
        assert await second.step(opened, turn(2)) == NeedsHistory()
        history = [Exchange(turn(number), reply) for number, reply in enumerate(replies(known))]
        last = await second.step(replace(opened, history=history), turn(2))
        await first.close(opened.key)
        return [last]

    assert replies(run(moved())) == [Reply(reward=3.0, done=True, metrics={"branches": 0.0})]


def test_the_guessing_agent_plays_the_game_of_the_guessing_environment() -> None:
    """Four turns without a number: the hints and the whole reward are those of the environment itself."""
    plays = {"function": "recipes.environments.guess_agent:play"}

    async def game(name: str, **arguments: Any) -> tuple[Opening | None, list[Reply]]:
        make = environment_class(name, arguments)
        host = Host(lambda _: make(), LIMITS)
        opening = await host.open({"ground_truth": "7"}, 5)
        return opening, replies([await host.step(episode(), turn(number, "x")) for number in range(4)])

    opening, own = run(game("recipes.environments.guess:GuessNumber"))
    asked, agents = run(game("verl_rc.runtime.rollout.environments.agent:Agent", **plays))
    assert asked is not None
    assert opening is not None
    assert asked.messages == opening.messages
    assert [one.messages for one in agents] == [one.messages for one in own]
    assert agents[-1].reward == pytest.approx(-0.4)
    assert agents[-1].metrics == {**own[-1].metrics, "branches": 0.0}


def test_calls_of_tools_are_taken_out_of_the_text() -> None:
    async def called() -> list[StepOutcome]:
        host = host_of(function="agents_of_a_user:add")
        call = 'I add <tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
        return [await host.step(episode(), turn(0, call)), await host.step(episode(), turn(1, "5"))]

    asks, ends = replies(run(called()))
    assert asks.messages == [{"role": "tool", "content": "5", "tool_call_id": "call_0_0"}]
    assert ends.reward == 1.0


@pytest.mark.parametrize(
    ("fault", "begun"),
    [
        ("edited", [[*ASKED, {"role": "assistant", "content": "edited"}, *H], [*ASKED, SAID, *H]]),
        (
            "own words",
            [
                [
                    *ASKED,
                    SAID,
                    *H,
                    {"role": "assistant", "content": "mine"},
                    {"role": "user", "content": "x"},
                ],
                [*ASKED, SAID, *H],
            ],
        ),
        ("other", [[{"role": "user", "content": "another conversation"}], [*ASKED, SAID, *H]]),
        ("twice", [[*ASKED, SAID, *H]]),
        ("gives up", [[{"role": "user", "content": "another conversation"}], [*ASKED, SAID, *H]]),
    ],
)
def test_what_is_no_continuation_begins_another_conversation_of_the_episode(
    fault: str, begun: list[list[dict[str, Any]]]
) -> None:
    """Calls that are made at the same time, too; the score is that of the episode."""
    given = replies(run(outcomes(playing({fault: 1}), 9)))
    assert [list(one.opening.messages) for one in given if one.opening is not None] == begun
    assert sum(reply.metrics.get("branches", 0) for reply in given) == len(begun)
    assert (given[-1].reward, given[-1].done) == (2.0, True)


def test_an_agent_that_ends_while_a_call_waits_has_its_score() -> None:
    given = replies(run(outcomes(host_of(function="agents_of_a_user:hurried"), 9)))
    assert (given[-1].reward, given[-1].done) == (3.0, True)


def test_options_that_change_how_tokens_are_drawn_are_refused_and_the_others_warned_of() -> None:
    with pytest.warns(UserWarning, match="temperature of an agent's calls has no effect"):
        first, last = replies(run(outcomes(playing({"n": 0}), 2)))
    assert (first, last.reward, last.metrics) == (Reply(H), 2.0, {"refused": 1.0, "branches": 0.0})
    why = why_failed(playing({"dies of a refusal": 0})).replace("\\", "")
    assert "failed after a call that was refused (stop must be left out, got ['x']: the run decides" in why


def test_a_turn_that_is_cut_off_is_followed_by_none() -> None:
    """A further call is refused by name; what the agent makes of that is the end of the episode."""

    async def cut() -> list[StepOutcome]:
        return [
            await playing(turns=1).step(episode(), turn(0, stopped=False)),
            await playing(turns=2).step(episode(), turn(0, stopped=False)),
        ]

    ended, failed = replies(run(cut()))
    assert ended == Reply(reward=1.0, done=True, metrics={"branches": 0.0})
    assert failed == Reply(truncated=True, metrics={"branches": 0.0})


def test_an_agent_whose_turns_a_limit_ends_still_ends_with_its_score() -> None:
    """Its call gets an answer without a word, whose finish reason is ``length``; a further one is refused."""

    async def ended(turns: int) -> list[StepOutcome]:
        host, none = playing(turns=turns), turn(1, "", token_ids=(), stopped=False)
        return [await host.step(episode(), turn(0)), await host.step(episode(), none)]

    assert replies(run(ended(2)))[1] == Reply(reward=2.0, done=True, metrics={"branches": 0.0})
    assert replies(run(ended(3)))[1] == Reply(truncated=True, metrics={"branches": 0.0})


@pytest.mark.parametrize(
    ("host", "why"),
    [
        (playing({"raise": 0}), r"Agent\(agents_of_a_user:play, 0 calls\) has failed: .*sandbox was lost"),
        (host_of(function="agents_of_a_user:mute"), "must call its endpoint .*but has ended without"),
        (
            playing({"silent": 0}, limits=HostLimits(step_seconds=0.5)),
            r"Agent\(agents_of_a_user:play, 0 calls\).reset must return within .*step_seconds=0.5",
        ),
        (host_of(command="false"), r"ended with exit code 1 and wrote"),
        (
            host_of(command=["bash", "-c", "echo trouble >&2; exit 3"]),
            "exit code 3 and wrote: trouble",
        ),
    ],
)
def test_an_agent_that_fails_is_named(host: Host, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(why_failed(host))


def test_an_agent_that_fails_later_is_named_with_its_calls() -> None:
    async def later() -> StepOutcome:
        host = playing({"raise": 1})
        return await host.step(episode(), turn(0))

    outcome = run(later())
    assert isinstance(outcome, Failure)
    assert "Agent(agents_of_a_user:play, 1 calls) has failed: RuntimeError('the sandbox" in outcome.reason
    assert outcome.may_retry


def test_a_client_that_gives_a_call_up_and_calls_again_gets_the_answer() -> None:
    async def slow() -> StepOutcome:
        host = host_of(function="agents_of_a_user:impatient")
        answering = asyncio.ensure_future(host.step(episode(), turn(0, "7")))
        step = Host._step

        async def late(self: Host, *arguments: Any) -> Any:
            await asyncio.sleep(1.0)
            return await step(self, *arguments)

        Host._step = late  # type: ignore[method-assign]
        try:
            return await answering
        finally:
            Host._step = step  # type: ignore[method-assign]

    (reply,) = replies([run(slow())])
    assert (reply.reward, reply.metrics) == (1.0, {"branches": 0.0})


def test_only_calls_without_an_answer_are_kept() -> None:
    async def kept() -> list[int]:
        agent = Agent(function=PLAY, arguments={"turns": 6})
        await agent.reset({}, 5)
        numbers = []
        for number in range(6):
            numbers.append(len(agent._calls))
            await agent.step(turn(number))
        await agent.close()
        return numbers

    assert max(run(kept())) == 1


def test_an_episode_may_have_so_many_calls_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_MAX_WAITING", 2)

    async def called() -> None:
        agent = Agent(function=PLAY)
        first, _ = (agent._pending(ChatCall([{"role": "user", "content": text}], [])) for text in "ab")
        with pytest.raises(RefusedCallError, match="an episode may have 2 calls that wait") as refusal:
            agent._pending(ChatCall(H, []))
        assert refusal.value.status == 429
        first.answer.set_result({})
        agent._pending(ChatCall(H, []))

    run(called())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({}, "needs environment.arguments.command or .function"),
        ({"function": "agents_of_a_user:not_async"}, "must be an async function"),
        ({"function": "agents_of_a_user:nobody"}, "must name a function in an importable module"),
        ({"command": "no-such-program"}, r"must begin with a program that can be run, got \['no-such"),
        ({"command": "true", "arguments": {"a": 1}}, "are those of a function"),
        ({"function": PLAY, "limits": {"bodies": 3}}, "unexpected keyword argument 'bodies'"),
        ({"function": PLAY, "limits": {"body_megabytes": 0}}, "must be above 0, got body_megabytes=0"),
    ],
)
def test_arguments_are_refused_by_name(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        environment_class("verl_rc.runtime.rollout.environments.agent:Agent", arguments)


def test_a_score_is_a_finite_number() -> None:
    for line in ("nothing", '{"reward": NaN}', '{"score": 1}'):
        script = f"import urllib.request as u, os, json; {_ONE_CALL}; print({line!r})"
        outcome = run(host_of(command=[sys.executable, "-c", script]).step(episode(), turn(0)))
        assert isinstance(outcome, Failure)
        assert "must end with a number" in outcome.reason or "must be a finite number" in outcome.reason


def test_an_agent_has_ended_when_its_process_has_whatever_that_leaves_behind() -> None:
    leave = "import subprocess; subprocess.Popen(['sleep', '60'])"
    script = f"import urllib.request as u, os, json; {_ONE_CALL}; {leave}; print(0.5)"
    limits = HostLimits(step_seconds=20)
    (last,) = replies(run(outcomes(host_of(limits, command=[sys.executable, "-c", script]), 1)))
    assert (last.reward, last.done) == (0.5, True)


@pytest.mark.parametrize("outputs", ["", "stdout=-3, stderr=-3, "])
def test_a_daemon_costs_no_episode_and_is_counted(outputs: str) -> None:
    """With and without outputs of its own."""
    leave = f"import subprocess; subprocess.Popen(['sleep', '3600'], {outputs}start_new_session=True)"
    script = f"import urllib.request as u, os, json; {_ONE_CALL}; {leave}; print(0.5)"
    limits = HostLimits(step_seconds=60)
    (last,) = replies(run(outcomes(host_of(limits, command=[sys.executable, "-c", script]), 1)))
    assert (last.reward, last.done) == (0.5, True)
    assert last.metrics == {"branches": 0.0, "left_processes": 1.0}


def test_a_child_that_is_about_to_end_may_write_the_score() -> None:
    script = f"import urllib.request as u, os, json; {_ONE_CALL}; os.system('(sleep .2; echo 0.25) &')"
    (last,) = replies(run(outcomes(host_of(command=[sys.executable, "-c", script]), 1)))
    assert last == Reply(reward=0.25, done=True, metrics={"branches": 0.0})


def test_secrets_of_the_environment_reach_an_agent_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_API_KEY", "a")
    monkeypatch.setenv("HF_TOKEN", "b")
    script = f"import urllib.request as u, os, json; {_ONE_CALL}; print(sum(name in os.environ for name in "
    script += "('SEARCH_API_KEY', 'HF_TOKEN', 'PATH', 'OPENAI_API_KEY')))"

    def known(**arguments: Any) -> float:
        host = host_of(command=[sys.executable, "-c", script], **arguments)
        (last,) = replies(run(outcomes(host, 1)))
        return last.reward

    assert known() == 2.0
    assert known(pass_env=["SEARCH_API_KEY"]) == 3.0
    make = "verl_rc.runtime.rollout.environments.agent:Agent"
    with pytest.raises(ValueError, match=r"arguments.pass_env must name .*\['NONE_SUCH'\] are not set"):
        environment_class(make, {"command": "true", "pass_env": ["NONE_SUCH"]})
    with pytest.raises(ValueError, match="pass_env belongs to a command"):
        environment_class(make, {"function": PLAY, "pass_env": ["SEARCH_API_KEY"]})


_ONE_CALL = (
    "u.urlopen(u.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps({'messages': "
    "[{'role': 'user', 'content': 'x'}]}).encode(), {'Authorization': 'Bearer ' + "
    "os.environ['OPENAI_API_KEY']})).read()"
)
_HOST = f"""
import asyncio, sys
from verl_rc.records.episode import Episode, Turn
from verl_rc.runtime.rollout.environments.agent import Agent
from verl_rc.runtime.rollout.environments.chat import ChatCall, RefusedCallError

async def main():
    agent = Agent(command={STUBBORN!r})
    await agent.reset({{}}, 5)
    print("open", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def _agents() -> list[int]:
    """Processes that run ``agents_of_a_user.py``."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if str(USER).encode() in words[:3]:
                found.append(int(folder.name))
    return found


def test_no_process_outlives_its_host_or_its_episode() -> None:
    with subprocess.Popen([sys.executable, "-c", _HOST], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "open\n"
        assert _agents()
        os.kill(host.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while _agents() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _agents()

    async def closed() -> None:
        one = host_of(command=STUBBORN)
        await one.step(episode(), turn(0))
        assert _agents()
        await one.close(episode().key)

    run(closed())
    while _agents() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _agents()


def test_a_row_that_is_too_long_for_a_variable_is_refused() -> None:
    with pytest.raises(EpisodeFailedError, match="a row must have at most 100000 characters"):
        run(host_of(command="true").open({"x": "y" * 200_000}, 5))
