"""Collecting completions: alignment, masks, and refusal of what must not reach the loss."""

import pytest
import torch

from verl_rc.data.batches import Completions, RolloutBatch
from verl_rc.rollout.response import build_rollout_batch, check_versions


def make_completions(**changes: torch.Tensor) -> Completions:
    fields = {
        "responses": torch.tensor([[7, 2, 0], [8, 9, 2]]),
        "response_lengths": torch.tensor([2, 3]),
        "rollout_log_probs": torch.tensor([[-0.5, -0.1, 0.0], [-1.0, -2.0, 0.0]]),
        "policy_versions": torch.tensor([[4, 4, -1], [4, 4, 4]]),
        "finished": torch.tensor([True, False]),
    }
    return Completions(**{**fields, **changes}, batch_size=[2])


def build(completions: Completions) -> RolloutBatch:
    return build_rollout_batch([[1], [1, 3]], [0, 0], completions, pad_token_id=5)


def test_prompts_left_and_responses_right_padded() -> None:
    rollouts = build(make_completions())
    assert rollouts.tokens.prompts.tolist() == [[5, 1], [1, 3]]
    assert rollouts.tokens.responses.tolist() == [[7, 2, 5], [8, 9, 2]]
    assert rollouts.response_mask.tolist() == [[True, True, False], [True, True, True]]


def test_a_missing_completion_is_refused() -> None:
    with pytest.raises(ValueError, match="1 requests, 2 completions"):
        build_rollout_batch([[1]], [0], make_completions(), pad_token_id=5)


@pytest.mark.parametrize("bad", [float("nan"), 0.7])
def test_a_log_prob_that_is_none_names_its_row(bad: float) -> None:
    log_probs = torch.tensor([[-0.5, -0.1, bad], [-1.0, bad, 0.0]])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        build(make_completions(rollout_log_probs=log_probs))


def test_an_empty_response_names_its_row() -> None:
    with pytest.raises(ValueError, match=r"at least one token, which does not hold for rows \[0\]"):
        build(make_completions(response_lengths=torch.tensor([0, 3])))


def test_a_token_of_other_weights_is_refused() -> None:
    rollouts = build(make_completions(policy_versions=torch.tensor([[4, 4, -1], [4, 3, 3]])))
    with pytest.raises(
        RuntimeError, match=r"version 4, but 2 tokens come from version \[3\] \(first in row 1\)"
    ):
        check_versions(rollouts, expected_version=4)
    check_versions(build(make_completions()), expected_version=4)
