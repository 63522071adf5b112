"""Rewards of an episode's turns, from samples to advantages, against plain loops over turns."""

import math
import random
import statistics
from dataclasses import dataclass

import pytest
import torch
from made_samples import answer, part
from ragged_rows import padded_step_of, whole

from verl_rc.algorithm.ppo.corrector import corrector_of
from verl_rc.algorithm.ppo.train_batch import StepInputs, token_rewards
from verl_rc.config.algorithm import AlgorithmConfig, KlControlConfig
from verl_rc.config.algorithms import ADVANTAGE_ESTIMATORS, EstimatorOption
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch
from verl_rc.records.parts import Sample
from verl_rc.records.rollout_batch import build_rollout_batch
from verl_rc.records.scored_batch import ScoredBatch

GAMMA, LAM = 0.9, 0.8
GROUP = 4
GARBAGE = torch.nan
"""What values and log-probs are at tokens of the environment, which nobody may read."""


@dataclass
class Turn:
    """A turn of the policy, and how many tokens the environment says behind it."""

    reward: float
    values: list[float]
    """Of the critic, one for each token."""
    answer: int


Episode = list[Turn]


def episodes(seed: int, rows: int = 8, longest_answer: int = 3) -> list[Episode]:
    source, answers = random.Random(seed), random.Random(longest_answer)
    return [
        [
            Turn(
                source.choice([-1.0, 0.0, 0.25, 2.0]),
                [source.gauss(0, 1) for _ in range(source.randint(1, 4))],
                answers.randint(1, longest_answer),
            )
            for _ in range(source.randint(1, 5))
        ]
        for _ in range(rows)
    ]


def rollouts_of(batch: list[Episode]) -> RolloutBatch:
    """Each turn but those of one token is cut in two by an update; the last answer of every other row is left
    out."""
    samples = []
    for row, episode in enumerate(batch):
        parts = []
        for turn in episode:
            length = len(turn.values)
            parts += [part([5] * piece, 3) for piece in (1, length - 1) if piece]
            parts.append(answer([9] * turn.answer))
        samples.append(Sample(row, parts[: len(parts) - row % 2]))
    rollouts = build_rollout_batch(
        [[1]] * len(batch),
        [row // GROUP for row in range(len(batch))],
        samples,
        turn_rewards=[[turn.reward for turn in episode] for episode in batch],
    )
    return whole(rollouts)


def spread(tokens: list[list[float]], mask: torch.Tensor, elsewhere: float) -> torch.Tensor:
    """One number for each token of the policy, at its position."""
    result = torch.full(mask.shape, elsewhere)
    result[mask] = torch.tensor([number for row in tokens for number in row])
    return result


def sampled(tensor: torch.Tensor, mask: torch.Tensor) -> list[list[float]]:
    """The numbers at the tokens of the policy."""
    return [row[there].tolist() for row, there in zip(tensor, mask, strict=True)]


def step_of(batch: list[Episode], estimator: str, *, beyond: float = 0.0, **options: object) -> StepInputs:
    """The step's train batch; ``beyond``: of every score, what no turn has earned."""
    rollouts = rollouts_of(batch)
    mask = rollouts.response_mask
    values = [[value for turn in episode for value in turn.values] for episode in batch]
    evaluations = PolicyEvaluations(
        proximal_log_probs=spread([[-1.0] * len(row) for row in values], mask, GARBAGE),
        reference_log_probs=spread([[-1.5] * len(row) for row in values], mask, GARBAGE),
        critic_values=spread(values, mask, GARBAGE),
        sum_pi_squared=spread(
            [[2 * math.exp(-1.0) + value * value for value in row] for row in values], mask, GARBAGE
        ),
        batch_size=rollouts.batch_size,
    )
    scores = torch.tensor([sum(turn.reward for turn in episode) + beyond for episode in batch])
    scored = ScoredBatch(rollouts, scores, reward_baselines=torch.full_like(scores, 0.5))
    config = AlgorithmConfig.model_validate({"adv_estimator": estimator, **options})
    mode = corrector_of(config.rollout_correction)
    return padded_step_of(scored, evaluations, config, mode, config.kl_ctrl.kl_coef, current_version=3)


def to_go(batch: list[Episode], gamma: float) -> list[list[float]]:
    """G_t of every token, token by token from the end of each episode."""
    rows = []
    for episode in batch:
        row, following = list[float](), 0.0
        for turn in reversed(episode):
            for place in range(len(turn.values)):
                following = (turn.reward if place == 0 else 0.0) + gamma * following
                row.append(following)
        rows.append(row[::-1])
    return rows


def lambda_returns(batch: list[Episode]) -> list[list[float]]:
    """A_t + V_t of every token with ``GAMMA`` and ``LAM``, which count tokens of the policy alone."""
    rows = []
    for episode in batch:
        row, next_value, next_advantage = list[float](), 0.0, 0.0
        for turn in reversed(episode):
            for place, value in enumerate(reversed(turn.values)):
                residual = (turn.reward if place == 0 else 0.0) + GAMMA * next_value - value
                next_advantage = residual + GAMMA * LAM * next_advantage
                next_value = value
                row.append(next_advantage + value)
        rows.append(row[::-1])
    return rows


def whitened(rows: list[list[float]]) -> list[list[float]]:
    numbers = [number for row in rows for number in row]
    mean, scale = statistics.fmean(numbers), statistics.stdev(numbers)
    return [[(number - mean) / scale for number in row] for row in rows]


def assert_rows(actual: torch.Tensor | None, mask: torch.Tensor, expected: list[list[float]]) -> None:
    assert actual is not None
    assert not actual[~mask].any()
    for row, wanted in zip(sampled(actual, mask), expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5, abs=1e-5)


SEEDS = pytest.mark.parametrize("seed", range(6))


@SEEDS
def test_gae_skips_the_tokens_of_the_environment(seed: int) -> None:
    batch = episodes(seed)
    step = step_of(batch, "gae", gamma=GAMMA, lam=LAM)
    mask, expected = step.batch.response_mask, lambda_returns(batch)
    values = [[value for turn in episode for value in turn.values] for episode in batch]
    assert_rows(step.returns, mask, expected)
    advantages = [[g - v for g, v in zip(*pair, strict=True)] for pair in zip(expected, values, strict=True)]
    assert_rows(step.batch.advantages, mask, whitened(advantages))


@SEEDS
def test_reinforce_plus_plus_takes_the_return_to_go(seed: int) -> None:
    batch = episodes(seed)
    step = step_of(batch, "reinforce_plus_plus", gamma=GAMMA)
    assert_rows(step.returns, step.batch.response_mask, to_go(batch, GAMMA))
    assert_rows(step.batch.advantages, step.batch.response_mask, whitened(to_go(batch, GAMMA)))


@SEEDS
def test_the_optimal_token_baseline_is_one_of_returns_to_go(seed: int) -> None:
    """The baseline of a place is the group's mean return to go from there, weighted by the gradient's size so
    far: what earlier turns have earned is in neither."""
    batch, expected = episodes(seed), list[list[float]]()
    returns = to_go(batch, 1.0)
    norms = [[1 + value * value for turn in episode for value in turn.values] for episode in batch]
    for row, row_returns in enumerate(returns):
        members = range(row // GROUP * GROUP, row // GROUP * GROUP + GROUP)
        advantages = []
        for place, to_come in enumerate(row_returns):
            there = [one for one in members if len(returns[one]) > place]
            weights = [sum(norms[one][: place + 1]) for one in there]
            total = math.fsum(w * returns[one][place] for w, one in zip(weights, there, strict=True))
            advantages.append(to_come - (total / math.fsum(weights) if len(there) > 1 else 0.0))
        expected.append(advantages)
    step = step_of(batch, "tir_optimal_token_baseline")
    assert_rows(step.batch.advantages, step.batch.response_mask, expected)


def test_remax_reads_the_sum_of_turns_because_it_subtracts_a_whole_score() -> None:
    batch = episodes(0)
    step = step_of(batch, "remax")
    expected = [
        [sum(turn.reward for turn in episode) - 0.5] * sum(len(turn.values) for turn in episode)
        for episode in batch
    ]
    assert_rows(step.batch.advantages, step.batch.response_mask, expected)


@pytest.mark.parametrize(
    "estimator",
    [
        name
        for name, spec in ADVANTAGE_ESTIMATORS.items()
        if "group_ids" in spec.inputs and not {"component_scores", "sum_pi_squared"} & set(spec.inputs)
    ],
)
@pytest.mark.parametrize("beyond", [0.0, 0.75])
def test_estimators_that_compare_groups_read_the_sum(estimator: str, beyond: float) -> None:
    """They give what they give for the same scores without turns."""
    batch = episodes(1)
    alone = [
        [Turn(0.0, turn.values, turn.answer) for turn in episode[:-1]]
        + [Turn(sum(turn.reward for turn in episode), episode[-1].values, episode[-1].answer)]
        for episode in batch
    ]
    by_turn, at_end = (step_of(one, estimator, beyond=beyond).batch.advantages for one in (batch, alone))
    assert by_turn.any()
    torch.testing.assert_close(by_turn, at_end)


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo", "tir_optimal_token_baseline"])
def test_how_much_the_environment_says_changes_nothing(estimator: str) -> None:
    """Nor does padding, which grows with the longest row."""
    options: dict[EstimatorOption, float] = (
        {"gamma": GAMMA} if "gamma" in ADVANTAGE_ESTIMATORS[estimator].options else {}
    )
    brief, verbose = (
        step_of(episodes(2, longest_answer=longest), estimator, **options).batch for longest in (1, 40)
    )
    assert verbose.advantages.shape[1] > brief.advantages.shape[1]
    for row, other in zip(
        sampled(brief.advantages, brief.response_mask),
        sampled(verbose.advantages, verbose.response_mask),
        strict=True,
    ):
        assert row == pytest.approx(other, rel=1e-5, abs=1e-6)


def test_the_kl_penalty_is_taken_from_the_rewards_of_turns() -> None:
    batch = [[Turn(1.0, [0.0, 0.0], 2), Turn(4.0, [0.0], 1)]] * GROUP
    kl_ctrl = KlControlConfig(kl_coef=0.5)
    step = step_of(batch, "reinforce_plus_plus", use_kl_in_reward=True, kl_ctrl=kl_ctrl)
    rewards = [-0.25, 0.75, 3.75]
    assert step.returns[0].tolist() == [sum(rewards), sum(rewards[1:]), 0.0, 0.0, rewards[2], 0.0]


def test_what_no_turn_has_earned_lies_on_the_last_token() -> None:
    mask = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])
    by_turn = torch.tensor([[0.0, 1.0, 0.0, 2.0], [0.5, 0.0, 0.0, 0.0], [0.0] * 4])
    rewards = token_rewards(torch.tensor([2.5, 0.5, 0.0]), by_turn, mask)
    assert rewards.tolist() == [[0, 1, 0, 1.5], [0.5, 0, 0, 0], [0] * 4]


def credited(batch: list[Episode], estimator: str) -> list[list[float]]:
    """Advantages of turns by the formula, turn by turn; not whitened."""
    to_come = [[sum(turn.reward for turn in episode[k:]) for k in range(len(episode))] for episode in batch]
    rows = []
    for row, episode in enumerate(batch):
        advantages = list[float]()
        for k, turn in enumerate(episode):
            start = row // GROUP * GROUP
            others = [one[k] for one in to_come[start : start + GROUP] if len(one) > k]
            mine, mean = to_come[row][k], statistics.fmean(others)
            if len(others) == 1:
                credit = 0.0
            elif estimator == "grpo":
                credit = (mine - mean) / (statistics.stdev(others) + 1e-6)
            elif estimator == "reinforce_plus_plus_baseline":
                credit = mine - mean
            else:
                credit = mine - (sum(others) - mine) / (len(others) - 1)
            advantages += [credit] * len(turn.values)
        rows.append(advantages)
    return rows


CREDITS_TURNS = [name for name, spec in ADVANTAGE_ESTIMATORS.items() if "turn_credit" in spec.options]


@SEEDS
@pytest.mark.parametrize("estimator", CREDITS_TURNS)
def test_credit_by_turn_compares_what_follows_turns_of_the_same_number(estimator: str, seed: int) -> None:
    batch = episodes(seed)
    step = step_of(batch, estimator, turn_credit="turn")
    expected = credited(batch, estimator.removesuffix("_vectorized"))
    if estimator == "reinforce_plus_plus_baseline":
        expected = whitened(expected)
    assert_rows(step.batch.advantages, step.batch.response_mask, expected)
    other = step_of(batch, estimator).batch.advantages
    assert not torch.equal(step.batch.advantages, other)


@pytest.mark.parametrize("estimator", CREDITS_TURNS)
def test_of_one_turn_both_credits_are_the_same(estimator: str) -> None:
    batch = [episode[:1] for episode in episodes(3)]
    by_turn, by_episode = (
        step_of(batch, estimator, turn_credit=credit).batch.advantages for credit in ("turn", "episode")
    )
    assert by_turn.any()
    assert torch.equal(by_turn, by_episode)
