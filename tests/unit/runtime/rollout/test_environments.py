"""The environments of the package."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conversing import episode
from made_samples import part
from make_tiny_model import build_tokenizer

from recipes.environments.guess import GuessNumber
from verl_rc.config.rollout import EnvironmentConfig, RolloutConfig
from verl_rc.records.episode import Episode, Exchange, Reply, Turn
from verl_rc.records.parts import Sample
from verl_rc.runtime.rollout.conversation import Conversations
from verl_rc.runtime.rollout.environment_host import Failure, StepResult, environment_host
from verl_rc.runtime.rollout.sampling import ConversationOptions, GenerationRequest


class CountDown:
    """A text game as Gymnasium has them: say the number one below."""

    closed = 0

    def __init__(self, start: int = 3) -> None:
        self.start = start

    def reset(self, seed: int, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self.left = self.start + seed % 2
        return f"{options['ground_truth']}{self.left}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        right = action == str(self.left - 1)
        self.left -= right
        return str(self.left), float(right), self.left == 0, not right, {"left": self.left, "text": "x"}

    def close(self) -> None:
        CountDown.closed += 1


def turns(*texts: str) -> list[Turn]:
    return [Turn(number, text, (number,), True) for number, text in enumerate(texts)]


def play(config: EnvironmentConfig, said: Sequence[Turn], row: dict[str, Any], seed: int = 0) -> list[Any]:
    async def steps() -> list[Any]:
        host, outcomes, history = environment_host(config), [], []
        for turn in said:
            outcome = await host.step(Episode((0, 0, 0), row, seed, history=list(history)), turn)
            outcomes.append(outcome)
            if isinstance(outcome, StepResult):
                history.append(Exchange(turn, outcome.reply))
        return outcomes

    return asyncio.run(steps())


def config(name: str, **facts: Any) -> EnvironmentConfig:
    return EnvironmentConfig(name=name, **facts)


def test_a_guess_is_answered_by_where_the_secret_lies() -> None:
    game = GuessNumber(numbers=10, turns=3)

    async def answers() -> list[Reply]:
        await game.reset({}, seed=5)
        below, above = game._secret - 1, game._secret + 1
        texts = ["no number", str(below) if below >= 0 else str(above), str(game._secret)]
        return [await game.step(turn) for turn in turns(*texts)]

    first, second, third = asyncio.run(answers())
    assert first.messages[0]["content"] == "?"
    assert second.messages[0]["content"] == ("l" if game._secret > 0 else "h")
    assert [one.reward for one in (first, second, third)] == [-0.1, -0.1, 1.0]
    assert (third.done, third.metrics) == (True, {"acc": 1.0, "guesses": 3.0})


def test_halving_finds_every_secret() -> None:
    async def halve(seed: int) -> Reply:
        game, low, high, number = GuessNumber(), 0, 10, 0
        await game.reset({}, seed)
        while True:
            guess = (low + high) // 2
            reply = await game.step(Turn(number, str(guess), (1,), True))
            if reply.ends:
                return reply
            hint = reply.messages[0]["content"]
            low, high, number = (low, guess, number + 1) if hint == "h" else (guess + 1, high, number + 1)

    assert all(asyncio.run(halve(seed)).metrics["acc"] == 1.0 for seed in range(40))


def test_research_is_paid_for_what_the_question_asks_for() -> None:
    row = {
        "prompt": [{"role": "user", "content": "b+e+7"}],
        "ground_truth": "53",
        "extra_info": {"facts": {"a": 1, "b": 12, "e": 34}},
    }
    research = config("recipes.environments.research:Research")

    def played(*texts: str) -> list[tuple[str, float]]:
        replies = [outcome.reply for outcome in play(research, turns(*texts), row)]
        return [("".join(m["content"] for m in reply.messages), reply.reward) for reply in replies]

    assert played("e", "b", "34+7+12", "53") == [("34", 0.1), ("12", 0.1), ("53", 0.1), ("", 1.0)]
    assert played("e", "e", "z", "34+7", "41") == [("34", 0.1), ("34", 0), ("?", 0), ("41", 0), ("", 0)]
    assert played("34+") == [("", 0.0)]


def test_a_game_of_gymnasium_is_an_environment() -> None:
    gym = config(
        "verl_rc.runtime.rollout.environments.gym:Gym",
        arguments={"game": f"{__name__}:CountDown", "start": 1},
    )
    first, second = play(gym, turns("1", "0"), {"ground_truth": "from "}, seed=1)
    assert first.reply == Reply([{"role": "user", "content": "1"}], 1.0, metrics={"left": 1.0})
    assert (second.reply.done, second.reply.truncated) == (True, False)
    (wrong,) = play(gym, turns("7"), {"ground_truth": ""})
    assert (wrong.reply.done, wrong.reply.truncated, wrong.reply.reward) == (False, True, 0.0)
    assert CountDown.closed == 2


def test_games_are_asked_for_no_move_where_a_limit_leaves_no_room() -> None:
    none = Turn(1, "", (), stopped=False)
    guess = config("recipes.environments.guess:GuessNumber")
    lost = play(guess, [*turns("no number"), none], {})[1]
    assert lost.reply == Reply(done=True, metrics={"acc": 0.0, "guesses": 1.0})
    gym = config("verl_rc.runtime.rollout.environments.gym:Gym", arguments={"game": f"{__name__}:CountDown"})
    ended = play(gym, [*turns("2"), none], {"ground_truth": ""})[1]
    assert ended.reply == Reply(truncated=True)


def test_a_row_names_its_environment() -> None:
    guess = {"name": "recipes.environments.guess:GuessNumber", "arguments": {"numbers": 1}}
    both = config(
        "verl_rc.runtime.rollout.environments.gym:Gym",
        arguments={"game": f"{__name__}:CountDown"},
        choices={"guess": guess},
    )
    (named,) = play(both, turns("0"), {"agent_name": "guess"})
    assert named.reply.metrics["acc"] == 1.0
    (unnamed,) = play(both, turns("2"), {"ground_truth": "", "agent_name": None})
    assert unnamed.reply.metrics == {"left": 2.0}
    (unknown,) = play(both, turns("2"), {"agent_name": "gess"})
    assert isinstance(unknown, Failure)
    assert not unknown.may_retry
    assert "choices=['guess'], got 'gess'" in unknown.reason
    without_choices = both.model_copy(update={"choices": {}})
    (unread,) = play(without_choices, turns("2"), {"ground_truth": "", "agent_name": "gess"})
    assert unread.reply.metrics == {"left": 2.0}


def test_an_environment_has_limits_of_time_and_of_its_state() -> None:
    slow = config("guessing:Guess", arguments={"latency": 0.5}, step_seconds=0.05)
    (late,) = play(slow, turns("x"), {})
    assert "step_seconds=0.05" in late.reason
    large = config("guessing:Guess", max_state_megabytes=1e-4)
    (refused,) = play(large, turns("x"), {})
    assert "max_state_megabytes=0.0001" in refused.reason


def test_an_episode_has_at_most_so_many_turns(tmp_path: Path) -> None:
    build_tokenizer(64).save_pretrained(tmp_path)
    rollout = RolloutConfig(environment=config("guessing:Guess", max_turns=2))
    conversations = Conversations.from_options(ConversationOptions(rollout, str(tmp_path), False, {}))
    request = GenerationRequest([0], 100, episode=episode(1))
    first = conversations.request_reply(request, Sample(0, [part([1], 0)], True), 90).result(10)
    assert (first.continues, first.sample.finished, len(first.sample.replies)) == (True, False, 1)
    grown = replace(first.sample, parts=[*first.sample.parts, part([2], 0)], finished=True)
    last = conversations.request_reply(request, grown, 90).result(10)
    assert (last.continues, last.sample.finished, len(last.sample.replies)) == (False, False, 2)
    assert last.sample.parts == grown.parts


@pytest.mark.parametrize("name", ["recipes.environments.guess:Guess", "nowhere:At"])
def test_an_environment_that_does_not_exist_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(ValueError, match=r"rollout.environment.name=.* must name a class"):
        environment_host(config(name))
