"""Episodes on a scripted sampler: which turns an environment gets, what the policy reads, and how an episode
goes on after a loss."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from conversing import END, ScriptedSampler, episode, ids, merging_tokenizer, options
from guessing import Guess
from made_samples import of_parts, part

from verl_rc.records.episode import Opening, Reply, Turn
from verl_rc.records.parts import Part, Sample, num_answers, num_tokens, token_ids
from verl_rc.records.tokenize import ContinuationEncoder, encode_opening
from verl_rc.runtime.rollout.conversation import Conversations, LocalHosts
from verl_rc.runtime.rollout.engine import Request
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.environment_host import Host, HostLimits, StepResult
from verl_rc.runtime.rollout.open_request import Box
from verl_rc.runtime.rollout.sampling import GenerationRequest
from verl_rc.runtime.rollout.step_loop import StepLoop

PATIENCE = 10.0
NO_LIMITS = HostLimits()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return merging_tokenizer()


class Games:
    """Games with a host of their own; a sample's prompt is one token, its number."""

    def __init__(self, tokenizer: Any, limits: HostLimits = NO_LIMITS, **arguments: Any) -> None:
        self.made: list[Guess] = []
        self.host = Host(self._make, limits)
        self._arguments = arguments
        self._conversations = Conversations(
            tokenizer, LocalHosts(self.host), {}, arguments.pop("most_turns", None), 1.0
        )
        self._end: int = tokenizer.eos_token_id

    def _make(self, _: object) -> Guess:
        self.made.append(Guess(**self._arguments))
        return self.made[-1]

    def play(
        self, scripts: list[list[list[int]]], requests: list[GenerationRequest] | None = None, most: int = 90
    ) -> tuple[ScriptedSampler, list[Any]]:
        """Returns the sampler and the outcome of each game."""
        sampler = ScriptedSampler(dict(enumerate(scripts)), self._conversations, self._end)
        box: Box = []
        loop = StepLoop(lambda: sampler)
        requests = requests or [
            GenerationRequest([n], 100 + n, episode=episode(n)) for n in range(len(scripts))
        ]
        given = options(most, self._end)
        loop.submit([Request(n, request, given) for n, request in enumerate(requests)], box)
        ended = dict(loop.take(box, len(requests), PATIENCE))
        return sampler, [ended[n] for n in range(len(requests))]


def wrong(tokenizer: Any, turns: int) -> list[list[int]]:
    """Turns that are never right; the first is two tokens, which its text would make one."""
    return [ids(tokenizer, "1", "2", END), *(ids(tokenizer, "x", END) for _ in range(turns - 1))]


def test_an_environment_gets_every_turn_and_the_policy_its_messages(tokenizer: Any) -> None:
    """Tokens of replies come from text alone; those that were sampled are never encoded again."""
    games = Games(tokenizer, max_turns=3)
    sampler, (sample,) = games.play([wrong(tokenizer, 3)])
    hints = [reply.messages[0]["content"] for reply in sample.replies[:-1]]
    first, second, third = wrong(tokenizer, 3)
    after = [ids(tokenizer, f"{hint}=") for hint in hints]
    assert [asked.prompt_token_ids for asked in sampler.calls] == [
        [0],
        [0, *first, *after[0]],
        [0, *first, *after[0], *second, *after[1]],
    ]
    assert [reply.reward for reply in sample.replies] == [-0.1, -0.1, -0.1]
    assert (sample.finished, sample.state, num_answers(sample.parts)) == (True, None, 2)
    sampled = [row for row in of_parts(sample.parts) if row[2] != -1]
    assert [token for token, *_ in sampled] == first + second + third  # nothing is appended when it is done
    assert (len(games.made), games.made[0].closed) == (1, 1)


async def answers_to(turns: list[list[int]], game: Guess) -> list[StepResult]:
    """Of a host to the first turns of episode 0, which are wrong."""
    host = Host(lambda _: game, NO_LIMITS)
    answers = [
        await host.step(episode(0), Turn(number, text, tuple(turn), True))
        for number, (text, turn) in enumerate(zip(["12", "x"], turns, strict=True))
    ]
    return [answer for answer in answers if isinstance(answer, StepResult)]


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("cut", ["in a turn", "after a turn", "after a reply"])
def test_an_episode_goes_on_from_its_sample_as_it_would_have(
    cut: str, snapshot: bool, tokenizer: Any
) -> None:
    """On an engine and a host that know nothing of it; with a noisy environment, also between a turn and its
    reply."""
    script = wrong(tokenizer, 4)
    _, (whole,) = Games(tokenizer, max_turns=4, snapshot=snapshot).play([script])
    first, second = asyncio.run(answers_to(script[:2], Guess(max_turns=4, snapshot=snapshot)))
    assert [first.reply, second.reply] == list(whole.replies[:2])
    *before, last, answer = whole.parts[:4]
    if cut == "after a reply":
        replies = [first.reply, second.reply]
        so_far = Sample(0, [*before, last, answer], replies=replies, state=second.state)
    else:
        assert isinstance(last, Part)
        if cut == "in a turn":
            last = part(last.token_ids.tolist()[:-1], last.version)
            script = [script[0], script[1][-1:], *script[2:]]
        so_far = Sample(0, [*before, last], replies=[first.reply], state=first.state)
    games = Games(tokenizer, max_turns=4, snapshot=snapshot)
    _, (resumed,) = games.play([script], [GenerationRequest([0], 100, None, so_far, episode(0))])
    assert token_ids(resumed.parts) == token_ids(whole.parts)
    assert list(resumed.replies) == list(whole.replies)
    (game,) = games.made
    assert game.turns[0].number == (len(so_far.replies) if snapshot else 0)


class Forgetful(Guess):
    """After the second turn it begins the conversation anew."""

    async def step(self, turn: Turn) -> Reply:
        reply = await super().step(turn)
        return reply if turn.number != 1 else replace(reply, messages=[], opening=ANEW)


ANEW = Opening([{"role": "user", "content": "anew"}])


@pytest.mark.parametrize("room", [90, 12])
def test_a_reply_may_begin_another_conversation(room: int, tokenizer: Any) -> None:
    """It is the prompt of the next turn, alone; its tokens count like those of other replies."""
    script = wrong(tokenizer, 3)
    host = Host(lambda _: Forgetful(), NO_LIMITS)
    sampler = ScriptedSampler(
        {0: script}, Conversations(tokenizer, LocalHosts(host), {}), tokenizer.eos_token_id
    )
    box: Box = []
    loop = StepLoop(lambda: sampler)
    request = GenerationRequest([0], 100, episode=episode(0))
    loop.submit([Request(0, request, options(room, tokenizer.eos_token_id))], box)
    ((_, sample),) = loop.take(box, 1, PATIENCE)
    begun = encode_opening(tokenizer, ANEW)
    if room == 12:
        assert (len(sampler.calls), sample.replies[-1].truncated) == (2, True)
        return
    assert sampler.calls[2].prompt_token_ids == begun
    assert [getattr(one, "restarts", None) for one in sample.parts] == [None, False, None, True, None]
    assert token_ids(sample.parts[3:]) == [*begun, *script[2]]
    assert sampler.calls[2].max_tokens == room - num_tokens(sample.parts[:4])


def test_a_turn_that_a_limit_cuts_off_only_gets_a_reward(tokenizer: Any) -> None:
    games = Games(tokenizer, max_turns=9)
    _, (sample,) = games.play([[ids(tokenizer, "12345678")]], most=8)
    assert (len(sample.replies), sample.finished, num_answers(sample.parts)) == (1, False, 0)
    assert games.made[0].closed == 1


@pytest.mark.parametrize("limit", ["turns", "tokens"])
def test_an_episode_that_a_limit_ends_behind_a_turn_gets_a_reward_for_it(limit: str, tokenizer: Any) -> None:
    """The messages that leave no room are left out; a turn without tokens asks for the reward, once."""
    first = wrong(tokenizer, 1)[0]
    by_turns = limit == "turns"
    games = Games(tokenizer, max_turns=9, most_turns=1 if by_turns else None)
    _, (sample,) = games.play([[first]], most=90 if by_turns else len(first) + 2)
    assert (sample.finished, sample.state, token_ids(sample.parts)) == (False, None, first)
    assert list(sample.replies) == [Reply(reward=-0.2, truncated=True, metrics={"right": 0.0})]
    (game,) = games.made
    assert game.turns == [Turn(0, "12", tuple(first), True), Turn(1, "", (), False)]
    assert game.closed == 1


@pytest.mark.parametrize("snapshot", [True, False])
def test_the_reward_behind_the_last_turn_survives_a_loss(
    snapshot: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is lost between the last turn and the one without tokens: state or turns bring it there."""
    script = wrong(tokenizer, 2)
    _, (whole,) = Games(tokenizer, snapshot=snapshot, max_turns=9, most_turns=2).play([script])
    step, failed = Guess.step, []

    async def flaky(self: Guess, turn: Turn) -> Reply:
        if turn.number == 2 and not failed:
            failed.append(turn)
            raise RuntimeError("the sandbox was lost")
        return await step(self, turn)

    monkeypatch.setattr(Guess, "step", flaky)
    games = Games(tokenizer, snapshot=snapshot, max_turns=9, most_turns=2)
    _, (sample,) = games.play([script])
    assert (list(sample.replies), len(failed), len(games.made)) == (list(whole.replies), 1, 2)
    assert sample.replies[-1].reward == -0.2


@pytest.mark.parametrize("snapshot", [True, False])
def test_a_step_that_fails_once_is_tried_again_from_state_or_turns(
    snapshot: bool, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (whole,) = Games(tokenizer, snapshot=snapshot).play([wrong(tokenizer, 3)])
    step, failed = Guess.step, []

    async def flaky(self: Guess, turn: Any) -> Any:
        if turn.number == 1 and not failed:
            failed.append(turn)
            raise RuntimeError("the sandbox was lost")
        return await step(self, turn)

    monkeypatch.setattr(Guess, "step", flaky)
    games = Games(tokenizer, snapshot=snapshot)
    _, (sample,) = games.play([wrong(tokenizer, 3)])
    assert (list(sample.replies), len(failed), len(games.made)) == (list(whole.replies), 1, 2)
    assert [reply.asked_again for reply in sample.replies] == [0, 1, 0]


def test_a_reply_says_how_long_its_sample_waited_for_it(tokenizer: Any) -> None:
    _, (sample,) = Games(tokenizer, latency=0.05).play([wrong(tokenizer, 3)])
    assert all(0.05 <= reply.waited < PATIENCE for reply in sample.replies)


@pytest.mark.parametrize(
    ("faults", "why", "tries"),
    [
        ({"raise": 1}, "turn 1 of episode .*the sandbox was lost", 2),
        ({"hang": 1}, "Guess.step must return within .*step_seconds=0.2", 2),
        ({"role": 1}, "must be of the roles user, tool or system", 1),
        ({"block": 1}, "an environment must leave its thread to others", 1),
    ],
)
def test_an_episode_that_fails_fails_its_sample_and_no_other(
    faults: dict[str, int], why: str, tries: int, tokenizer: Any
) -> None:
    games = Games(tokenizer, HostLimits(step_seconds=0.2), faults=faults)
    other = Guess()
    asyncio.run(other.reset({}, episode(0).seed))
    right = ids(tokenizer, str(other.secret), END)
    _, (won, lost) = games.play([[right], wrong(tokenizer, 3)])
    assert isinstance(won, Sample)
    assert [reply.reward for reply in won.replies] == [1.0]
    assert isinstance(lost, EpisodeFailedError)
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(lost))
    assert len(games.made) == 1 + tries


def test_messages_that_the_template_cannot_go_on_with_fail_their_sample_and_no_other(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = ContinuationEncoder.encode

    def no_questions(self: Any, messages: Any) -> list[int]:
        if messages[0]["content"] == "?":
            raise ValueError("the chat template must render")
        return encode(self, messages)

    monkeypatch.setattr(ContinuationEncoder, "encode", no_questions)
    outcomes = Games(tokenizer).play([wrong(tokenizer, 3)] * 6)[1]
    failed = [str(one) for one in outcomes if isinstance(one, EpisodeFailedError)]
    assert 0 < len(failed) < 6
    assert failed[0].startswith("the environment's reply to turn ")
