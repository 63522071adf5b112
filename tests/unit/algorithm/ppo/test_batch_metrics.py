"""Descriptions of a batch, on numbers that can be read and against the standard library."""

import math
import statistics

import pytest
import torch
from appendix_a import random_case, rows
from ragged_rows import ragged
from small_models import make_train_batch

from verl_rc.algorithm.ppo.batch_metrics import batch_metrics, probability_gap
from verl_rc.algorithm.ppo.train_batch import StepInputs
from verl_rc.records.batches import PolicyEvaluations, RolloutBatch
from verl_rc.records.scored_batch import ScoredBatch


def make_rollouts(lengths: list[int]) -> RolloutBatch:
    batch = make_train_batch(lengths)
    return RolloutBatch(
        tokens=batch.tokens,
        response_mask=batch.response_mask,
        rollout_log_probs=batch.rollout_log_probs,
        policy_versions=torch.zeros(len(lengths), 7, dtype=torch.int64),
        group_ids=torch.arange(len(lengths)),
        finished=torch.ones(len(lengths), dtype=torch.bool),
        batch_size=[len(lengths)],
    )


def step_inputs(
    rollouts: RolloutBatch, rewards: torch.Tensor, scores: torch.Tensor | None = None
) -> StepInputs:
    lengths = rollouts.tokens.response_lengths.tolist()
    scored = ScoredBatch(ragged(rollouts), torch.zeros(len(lengths)) if scores is None else scores)
    evaluations = scored.rollouts.become(PolicyEvaluations)
    batch, returns = ragged(make_train_batch(lengths)), torch.zeros(sum(lengths))
    return StepInputs(scored, evaluations, batch, None, rewards.sum(-1), returns, None)


@pytest.mark.parametrize("sizes", [[0, 4, 2], [0, 0, 0]])
def test_tokens_without_a_record_of_their_support_are_counted(sizes: list[int]) -> None:
    rollouts = make_rollouts([1, 1, 1])
    rollouts.tokens.support_counts = rollouts.response_mask * torch.tensor(sizes)[:, None]
    metrics = batch_metrics(step_inputs(rollouts, torch.zeros(3, 7)), 5, 100)
    assert metrics["support/unrecorded_ratio"] == pytest.approx(sizes.count(0) / 3)


def test_turns_and_tool_calls_where_there_are_tools() -> None:
    lengths, zeros = [7, 2], torch.zeros(2, 7)
    rollouts = make_rollouts(lengths)
    metrics = batch_metrics(step_inputs(rollouts, zeros), 7, 100)
    assert not [name for name in metrics if "turn" in name.split("/")[0] and "return" not in name]
    rollouts.num_turns, rollouts.tool_calls = torch.tensor([6, 2]), torch.tensor([3, 0])
    metrics = batch_metrics(step_inputs(rollouts, zeros), 7, 100)
    assert [metrics[f"num_turns/{statistic}"] for statistic in ("mean", "max", "min")] == [4, 6, 2]
    assert [metrics[f"tool_call_counts/{statistic}"] for statistic in ("mean", "max", "min")] == [1.5, 3, 0]


@pytest.mark.parametrize("seed", range(3))
def test_against_the_standard_library(seed: int) -> None:
    train, rollout, mask = random_case(7, 6, seed)
    p, q = ([math.exp(x) for x in log_probs[mask].tolist()] for log_probs in (train, rollout))
    gaps = [abs(a - b) for a, b in zip(p, q, strict=True)]
    train[~mask], rollout[~mask] = math.nan, -math.inf
    assert probability_gap(train, rollout, mask) == pytest.approx(
        {
            "training/rollout_probs_diff_valid": 1.0,
            "training/rollout_probs_diff_mean": statistics.fmean(gaps),
            "training/rollout_probs_diff_max": max(gaps),
            "training/rollout_probs_diff_std": statistics.pstdev(gaps),
            "training/rollout_actor_probs_pearson_corr": statistics.correlation(p, q),
        }
    )


def test_nothing_to_compare() -> None:
    train, rollout, mask = rows()
    assert probability_gap(train, rollout, torch.zeros_like(mask)) == {
        "training/rollout_probs_diff_valid": 0.0
    }
    assert probability_gap(train[:0], rollout[:0], mask[:0]) == {"training/rollout_probs_diff_valid": 0.0}


def test_constant_probabilities_have_no_correlation() -> None:
    gap = probability_gap(torch.zeros(1, 3), torch.zeros(1, 3), torch.ones(1, 3))
    assert "training/rollout_actor_probs_pearson_corr" not in gap
    assert gap["training/rollout_probs_diff_max"] == 0.0
