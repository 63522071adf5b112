"""Episodes of a host: the same from state, from turns and never moved; what fails, and how it is told."""

import asyncio
import io
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from guessing import Guess

from verl_rc.records.episode import BadReplyError, Episode, Exchange, Opening, Reply, Turn
from verl_rc.runtime.rollout.conversation import LocalHosts
from verl_rc.runtime.rollout.environment import Environment, EpisodeFailedError, environment_class
from verl_rc.runtime.rollout.environment_host import (
    Failure,
    Host,
    HostLimits,
    NeedsHistory,
    StepOutcome,
    StepResult,
)

T = TypeVar("T")
NO_LIMITS = HostLimits()
WRONG = [Turn(number, "x", (number,), True) for number in range(9)]
"""Guesses that are never right."""


def run(call: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(call)


def host_of(limits: HostLimits = NO_LIMITS, **arguments: Any) -> tuple[Host, list[Guess]]:
    """A host, and the environments that it makes."""
    made: list[Guess] = []

    def make(_: object) -> Environment:
        made.append(Guess(**arguments))
        return made[-1]

    return Host(make, limits), made


def episode(seed: int = 5, **facts: Any) -> Episode:
    return Episode((3, 1, 0), {"ground_truth": "7"}, seed, **facts)


async def play(host: Host, turns: Sequence[Turn], at: Episode) -> list[StepOutcome]:
    """The outcomes of turns, each sent with the state before it."""
    outcomes: list[StepOutcome] = []
    for turn in turns:
        outcomes.append(await host.step(at, turn))
        if isinstance(outcomes[-1], StepResult):
            at = replace(at, state=outcomes[-1].state)
    return outcomes


def replies(outcomes: Sequence[StepOutcome]) -> list[Reply]:
    assert all(isinstance(one, StepResult) for one in outcomes), outcomes
    return [one.reply for one in outcomes if isinstance(one, StepResult)]


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("lost_after", [1, 2, 3, 4])
def test_an_episode_goes_on_elsewhere_as_it_would_have_here(snapshot: bool, lost_after: int) -> None:
    """On a host that knows nothing of it: from its state, or else from its turns."""

    async def moved() -> tuple[list[Reply], list[Reply]]:
        host, _ = host_of(snapshot=snapshot, max_turns=6)
        whole = replies(await play(host, WRONG[:6], episode()))
        first, _ = host_of(snapshot=snapshot, max_turns=6)
        known = await play(first, WRONG[:lost_after], episode())
        (*_, last) = known
        assert isinstance(last, StepResult)
        at = episode(state=last.state)
        second, made = host_of(snapshot=snapshot, max_turns=6)
        if not snapshot:
            assert await second.step(at, WRONG[lost_after]) == NeedsHistory()
            pairs = zip(WRONG, replies(known), strict=False)
            at = replace(at, history=[Exchange(turn, reply) for turn, reply in pairs])
        rest = await play(second, WRONG[lost_after:6], at)
        (environment,) = made
        assert environment.turns == WRONG[lost_after if snapshot else 0 : 6]
        return whole, replies(known) + replies(rest)

    whole, joined = run(moved())
    assert joined == whole
    assert len({reply.messages[0]["content"] for reply in whole[:-1]}) > 1  # the hints are noisy


def test_a_turn_that_is_sent_twice_gets_the_same_reply() -> None:
    """Also while the first is at work: the environment steps once."""

    async def twice() -> None:
        host, made = host_of(latency=0.05, max_turns=9)
        first, second = await asyncio.gather(host.step(episode(), WRONG[0]), host.step(episode(), WRONG[0]))
        assert first == second == await host.step(episode(), WRONG[0])
        assert (made[0].guesses, len(made)) == (1, 1)

    run(twice())


def test_an_episode_whose_turns_went_elsewhere_meanwhile_is_opened_again() -> None:
    async def elsewhere() -> None:
        host, made = host_of(max_turns=9)
        other, _ = host_of(max_turns=9)
        (first,) = await play(host, WRONG[:1], episode())
        assert isinstance(first, StepResult)
        known = await play(other, WRONG[1:3], episode(state=first.state))
        (_, last) = known
        assert isinstance(last, StepResult)
        back = await host.step(episode(state=last.state), WRONG[3])
        assert back == await other.step(episode(state=last.state), WRONG[3])
        assert (len(made), made[0].closed) == (2, 1)

    run(elsewhere())


@pytest.mark.parametrize(
    ("faults", "reason", "may_retry"),
    [
        (
            {"raise": 0},
            r"the environment, turn 0 of episode \(3, 1, 0\): RuntimeError\('the sandbox was lost'\)",
            True,
        ),
        ({"timeout": 0}, r"turn 0 of episode \(3, 1, 0\): TimeoutError\('no answer of the database'\)", True),
        ({"hang": 0}, r"Guess.step must return within .*step_seconds=0.1", True),
        ({"nan": 0}, "Reply.reward must be a finite number, got nan", False),
        ({"role": 0}, "Reply.messages must be of the roles user, tool or system", False),
    ],
)
def test_what_fails_names_environment_turn_and_cause(
    faults: dict[str, int], reason: str, may_retry: bool
) -> None:
    async def fail() -> None:
        host, made = host_of(HostLimits(step_seconds=0.1), faults=faults)
        outcome = await host.step(episode(), WRONG[0])
        assert isinstance(outcome, Failure)
        assert outcome.may_retry is may_retry
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(outcome.reason)
        assert (len(host), made[0].closed) == (0, 1)

    run(fail())


def test_an_environment_that_replies_otherwise_to_the_same_turns_is_not_deterministic() -> None:
    async def replay() -> StepOutcome:
        outcomes = []
        for _ in range(8):  # a hint is another one with a probability of a half or more
            host, _ = host_of(snapshot=False, faults={"random": 0}, max_turns=9)
            known = replies(await play(host, WRONG[:3], episode()))
            history = [Exchange(turn, reply) for turn, reply in zip(WRONG, known, strict=False)]
            other, _ = host_of(snapshot=False, faults={"random": 0}, max_turns=9)
            outcomes.append(await other.step(episode(history=history), WRONG[3]))
        return next(one for one in outcomes if isinstance(one, Failure))

    outcome = run(replay())
    assert isinstance(outcome, Failure)
    assert not outcome.may_retry
    assert "must reply alike to the same turns, but to turn" in outcome.reason


def test_a_policy_at_fault_ends_its_episode_with_its_reward() -> None:
    async def fault() -> None:
        host, made = host_of(faults={"policy": 0})
        outcome = await host.step(episode(), WRONG[0])
        assert isinstance(outcome, StepResult)
        assert (outcome.reply.reward, outcome.reply.ends, made[0].closed) == (-5.0, True, 1)

    run(fault())


def test_an_episode_is_closed_when_it_ends_is_cut_off_or_is_left_alone() -> None:
    async def close() -> None:
        host, made = host_of(HostLimits(idle_seconds=0.05), faults={"close": 0}, max_turns=1)
        await host.step(episode(), WRONG[0])
        assert (len(host), made[0].closed) == (0, 1)
        host, made = host_of(HostLimits(idle_seconds=0.05), max_turns=9)
        cut = await host.step(episode(), replace(WRONG[0], stopped=False))
        assert (len(host), isinstance(cut, StepResult)) == (0, True)
        await host.step(episode(), WRONG[0])
        await asyncio.sleep(0.1)
        await host.step(replace(episode(), key=(4, 0, 0)), WRONG[0])
        assert (len(host), made[1].closed) == (1, 1)

    run(close())


def test_an_episode_that_is_asked_for_while_others_are_closed_stays_open() -> None:
    async def ask() -> None:
        host, made = host_of(HostLimits(idle_seconds=0.05), max_turns=9, latency=0.1)

        def step(number: int) -> "asyncio.Task[StepOutcome]":
            return asyncio.create_task(host.step(replace(episode(), key=(number, 0, 0)), WRONG[0]))

        await asyncio.gather(step(0), step(1))
        await asyncio.sleep(0.1)
        leave = asyncio.Event()
        made[0].close = leave.wait  # type: ignore[assignment, method-assign]
        third = step(2)  # closes the first two, and waits for the first
        await asyncio.sleep(0.01)
        second = step(1)
        await asyncio.sleep(0.01)
        leave.set()
        await asyncio.gather(second, third)
        assert (len(host), [one.closed for one in made[1:]]) == (2, [1, 0, 0])

    run(ask())


def test_a_state_has_a_largest_size() -> None:
    outcome = run(host_of(HostLimits(state_megabytes=1e-4))[0].step(episode(), WRONG[0]))
    assert isinstance(outcome, Failure)
    assert "max_state_megabytes=0.0001" in outcome.reason


def test_an_opening_is_that_of_reset_and_nothing_stays_open() -> None:
    async def opened() -> None:
        host, made = host_of()
        opening = await host.open({"ground_truth": "7"}, 5)
        assert opening is not None
        assert opening.messages == [{"role": "user", "content": "guess 7"}]
        assert (len(host), made[0].closed) == (0, 1)

    run(opened())


def test_a_sample_whose_environment_opens_otherwise_than_its_prompt_fails() -> None:
    """Its tokens would be trained on behind a prompt that its environment never gave."""

    async def reopened(content: str) -> StepOutcome:
        host, _ = host_of()
        return await host.step(episode(opening=Opening([{"role": "user", "content": content}])), WRONG[0])

    assert isinstance(run(reopened("guess 7")), StepResult)
    outcome = run(reopened("guess 8"))
    assert isinstance(outcome, Failure)
    assert "reset must open alike for all samples of a prompt, but it gave Opening" in outcome.reason


def test_a_host_opens_some_episodes_at_once_and_the_others_after_them() -> None:
    """The time limit of one begins with its turn: a hundred slow ones are opened."""
    opening, most = [0], [0]

    class Slow(Guess):
        async def reset(self, row: Any, seed: int) -> Any:
            opening[0] += 1
            most[0] = max(most[0], opening[0])
            await asyncio.sleep(0.05)
            opening[0] -= 1
            return await super().reset(row, seed)

    async def open_all() -> None:
        host = Host(lambda _: Slow(), HostLimits(step_seconds=0.1))
        await asyncio.gather(*(host.open({}, seed) for seed in range(100)))

    run(open_all())
    assert most == [32]


def test_classes_are_found_by_name_and_refused_by_name() -> None:
    assert isinstance(environment_class("guessing:Guess", {"max_turns": 2})(), Guess)
    for name, arguments, reason in (
        ("guessing:WithoutStep", {}, "abstract method.* step"),
        ("guessing:Guess", {"turns": 2}, "unexpected keyword argument 'turns'"),
        (
            "verl_rc.runtime.rollout.environments.gym:Gym",
            {"game": "builtins:open", "file": "/none"},
            r"gym:Gym must be made by .*arguments=.*, but: FileNotFoundError\(2",
        ),
        ("guessing:json", {}, "must be a verl_rc.runtime.rollout.environment.Environment"),
        ("guessing:Gess", {}, "must name a class in an importable module"),
    ):
        with pytest.raises(ValueError, match=reason):
            environment_class(name, arguments)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "must have messages for the policy's next turn, or done=True"),
        ({"done": True, "reward": "1"}, "Reply.reward must be a finite number, got '1'"),
        ({"done": True, "reward": 1e39}, r"Reply.reward must be a finite number, got 1e\+39"),
        ({"done": True, "metrics": {"a": float("inf")}}, r"Reply.metrics\['a'\] must be a finite number"),
        ({"messages": ["hello"]}, "Reply.messages must be of the roles"),
        ({"done": True, "extra_info": {"a": object()}}, "Reply.extra_info must hold texts, .*, got object"),
    ],
)
def test_a_reply_says_what_it_must_be(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadReplyError, match=reason):
        Reply(**facts)


def test_what_numpy_computed_for_a_reply_comes_back_from_a_checkpoint() -> None:
    """A checkpoint is read without any class but Python's own."""
    facts = {"seen": [np.int64(3)]}
    messages = ({"role": "user", "content": np.str_("ab")},)
    given = Reply(messages, np.float32(0.5), np.bool_(False), metrics={"a": np.float64(2)}, extra_info=facts)
    facts["seen"].append(4)  # the environment goes on with its own
    file = io.BytesIO()
    torch.save([asdict(given), asdict(Opening(messages))], file)
    file.seek(0)
    reply, opening = torch.load(file, weights_only=True)
    assert Reply(**reply) == given
    assert opening == {"messages": [{"role": "user", "content": "ab"}], "tools": []}
    assert (reply["reward"], reply["done"], reply["metrics"]) == (0.5, False, {"a": 2.0})
    assert reply["extra_info"] == {"seen": [3]}


class Leaves(Environment):
    """Ends its process, as a script would."""

    async def reset(self, row: Any, seed: int) -> None:
        if seed:
            raise SystemExit(3)

    async def step(self, turn: Turn) -> Reply:
        raise SystemExit(4)


def test_an_environment_that_exits_fails_alone() -> None:
    hosts = LocalHosts(Host(lambda _: Leaves(), NO_LIMITS))
    for _ in range(2):
        with pytest.raises(EpisodeFailedError, match=r"failed to open an episode: SystemExit\(3\)"):
            run(hosts.open({}, 5))
        outcome = run(hosts.step(episode(seed=0), WRONG[0]))
        assert isinstance(outcome, Failure)
        assert "SystemExit(4)" in outcome.reason
