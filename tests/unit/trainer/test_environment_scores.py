"""A step whose samples are episodes: their prompts, their rewards and their numbers; and failures, which a
synchronous run survives."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from made_samples import answer, part
from ragged_rows import whole
from table_engines import Engines, make_run, prompt, sample

from verl_rc.algorithm.health.run_limits import TooManyFailedGroupsError
from verl_rc.records.dataset import PromptRow
from verl_rc.records.episode import Reply
from verl_rc.records.parts import Sample
from verl_rc.runtime.rollout.environment import EpisodeFailedError
from verl_rc.runtime.rollout.sampling import GenerationRequest, SamplingOptions
from verl_rc.trainer.cluster.engine_work import AssignedRequest
from verl_rc.trainer.evaluate import open_for_validation
from verl_rc.trainer.supply.scored_groups import _environment_columns

NAME = "actor_rollout_ref.rollout.environment.name=guessing:Guess"
REWARD = "actor_rollout_ref.rollout.environment.reward"


class Episodes(Engines):
    """Sample k of a prompt has two turns of k + 1 tokens, with rewards -0.5 and k."""

    def sample(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        samples = []
        for index, request in enumerate(requests):
            assert request.episode is not None
            k = request.episode.key[1]
            turn = part([request.prompt_token_ids[0]] * (k + 1), self.version)
            replies = [
                Reply([{"role": "user", "content": "?"}], -0.5, metrics={"tries": 1.0}),
                Reply(reward=float(k), done=True, metrics={"tries": 1.0, "acc": float(k)}),
            ]
            samples.append(Sample(index, [turn, answer([90]), turn], True, replies, None))
        return samples


class Openings:
    """An environment opens with the row's number plus 40, once for the samples of a prompt."""

    def __init__(self) -> None:
        self.seeds: list[int] = []

    def open(self, rows: Sequence[tuple[PromptRow, int]]) -> list[PromptRow]:
        self.seeds += [seed for _, seed in rows]
        return [replace(row, prompt_token_ids=[row.row_index + 40]) for row, _ in rows]


def test_a_batch_has_two_hundred_columns_of_environments() -> None:
    episodes = [
        [Reply(done=True, metrics={"all": 1.0, **{f"e{place}m{number}": 2.0 for number in range(99)}})]
        for place in range(4)
    ]
    columns = _environment_columns(episodes)
    assert len(columns) == 201
    assert columns["env/all"] == [1.0] * 4
    assert columns["env/e0m5"] == [2.0, None, None, None]
    # 1 + 99 + 99 + 1 of the names are shown, by the alphabet where they are as frequent
    assert columns["env/dropped_metrics"] == [0.0, 0.0, 98.0, 99.0]


def run_of(*overrides: str) -> Any:
    run = make_run(NAME, *overrides)
    run.engines, run.openings = Episodes(), Openings()
    return run


@pytest.mark.parametrize(
    ("source", "scores", "at_ends"),
    [
        ("turns", [-0.5, 0.5] * 2, True),
        ("function", [0.0, 1.0] * 2, False),  # the scorer of the tests reads the length: 3 and 5 letters
        ("sum", [-0.5, 1.5] * 2, True),
    ],
)
def test_rewards_are_those_of_turns_of_the_function_or_both(
    source: str, scores: list[float], at_ends: bool
) -> None:
    run = run_of(f"{REWARD}={source}")
    run.scorer.score = lambda rows, texts: [
        replace(output, score=float(len(text) == 5))
        for text, output in zip(texts, type(run.scorer)().score(rows, ["x"] * len(texts)), strict=True)
    ]
    batch, metrics = sample(run)
    assert batch.scores.tolist() == scores
    assert whole(batch.rollouts).tokens.prompts[:, 0].tolist() == [40, 40, 41, 41]
    assert len(set(run.openings.seeds)) == 2
    assert metrics["env/tries/mean"] == 2.0
    if source != "function":
        assert batch.extras["acc"] == ([0.0, 1.0] * 2 if source == "turns" else [1.0, 1.0, 0.0, 0.0])
    rewards = batch.rollouts.turn_rewards
    assert (rewards is not None) == at_ends
    if rewards is not None:
        assert whole(batch.rollouts).turn_rewards.tolist() == [[-0.5, 0, 0, 0, 0], [0, -0.5, 0, 0, 1]] * 2
        assert rewards[batch.rollouts.response_mask].count_nonzero() == rewards.count_nonzero()


class Telling(Episodes):
    """Its second reply tells the reward function something."""

    def sample(self, requests: Sequence[GenerationRequest], options: SamplingOptions) -> list[Sample]:
        return [
            replace(one, replies=[replace(one.replies[0], extra_info={"a": 1, "b": 1}), told])
            for one in super().sample(requests, options)
            for told in [replace(one.replies[1], extra_info={"b": one.replies[1].reward})]
        ]


def test_the_reward_function_gets_what_replies_tell_it_and_the_number_of_messages() -> None:
    run, seen = run_of(f"{REWARD}=function"), []
    run.engines = Telling()
    score = run.scorer.score

    def scored(rows: Sequence[PromptRow], texts: Sequence[str]) -> Any:
        seen.extend(row.extra_info for row in rows)
        return score(rows, ["x"] * len(texts))

    run.scorer.score = scored
    batch, _ = sample(run)
    # a prompt, two turns, and a reply between them; of two values of one name the last counts
    assert seen == [{"num_turns": 4, "a": 1, "b": float(k)} for k in (0, 1, 0, 1)]
    assert [row.extra_info for row in batch.prompts] == [{}] * len(batch.prompts)


class Failing(Episodes):
    """The environment fails in every first attempt, or always."""

    def __init__(self, attempts: int) -> None:
        super().__init__()
        self.attempts = attempts

    def collect(self, wait_seconds: float, replace_lost: Any) -> list[AssignedRequest]:
        ended = super().collect(wait_seconds, replace_lost)
        for request in ended:
            episode = request.queued.request.episode
            assert episode is not None
            if episode.key[0] == 0 and episode.key[2] < self.attempts:
                request.outcome = "the environment, turn 1: the sandbox was lost"
        return ended


def test_a_prompt_whose_environment_fails_is_sampled_once_more_with_other_seeds() -> None:
    run = run_of()
    run.engines = Failing(attempts=1)
    batch, _ = sample(run)
    assert len(batch) == 4
    assert len(set(run.openings.seeds)) == 3


def test_a_prompt_whose_environment_fails_again_is_replaced_in_a_synchronous_run_too() -> None:
    run = run_of()
    run.engines = Failing(attempts=2)
    batch, _ = sample(run)
    assert whole(batch.rollouts).tokens.prompts[:, 0].tolist() == [41, 41, 42, 42]


def test_an_environment_that_always_fails_ends_the_run() -> None:
    run = run_of()

    class Always(Failing):
        def collect(self, wait_seconds: float, replace_lost: Any) -> list[AssignedRequest]:
            ended = Engines.collect(self, wait_seconds, replace_lost)
            for request in ended:
                request.outcome = "the sandbox was lost"
            return ended

    run.engines = Always(attempts=9)
    with pytest.raises(TooManyFailedGroupsError, match="the sandbox was lost"):
        sample(run)


class Shut(Openings):
    """The environment of a row of the data, or of every row (None), fails to open its first attempts."""

    def __init__(self, row: int | None, attempts: int) -> None:
        super().__init__()
        self.row, self.attempts = row, attempts

    def open(self, rows: Sequence[tuple[PromptRow, int]]) -> list[Any]:
        opened: list[Any] = []
        for (row, _), with_opening in zip(rows, super().open(rows), strict=True):
            fails = self.row in (None, row.row_index) and self.attempts > 0
            self.attempts -= fails
            opened.append(EpisodeFailedError("no sandbox is left") if fails else with_opening)
        return opened


def test_a_prompt_whose_environment_fails_to_open_is_opened_once_more_with_another_seed() -> None:
    run = run_of()
    run.openings = Shut(row=0, attempts=1)
    batch, _ = sample(run)
    assert whole(batch.rollouts).tokens.prompts[:, 0].tolist() == [40, 40, 41, 41]
    assert len(set(run.openings.seeds)) == 3


def test_a_prompt_whose_environment_fails_to_open_again_is_replaced() -> None:
    run = run_of()
    run.openings = Shut(row=0, attempts=2)
    batch, _ = sample(run)
    assert whole(batch.rollouts).tokens.prompts[:, 0].tolist() == [41, 41, 42, 42]


def test_an_environment_that_never_opens_ends_the_run() -> None:
    run = run_of()
    run.openings = Shut(row=None, attempts=99)
    with pytest.raises(TooManyFailedGroupsError, match="no sandbox is left"):
        sample(run)
    with pytest.raises(ValueError, match="no sandbox is left"):
        open_for_validation([prompt(0)], run.openings, seed=1)
