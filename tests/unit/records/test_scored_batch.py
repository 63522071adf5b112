"""Samples: every row has its prompt, and what does not fit the rollouts is named."""

from typing import Any

import pytest
import torch

from verl_rc.records.batches import RolloutBatch, TokenBatch
from verl_rc.records.dataset import PromptRow
from verl_rc.records.scored_batch import ScoredBatch

PAD = 99


def make_rollouts(prompts: list[list[int]], responses: list[list[int]], group_ids: list[int]) -> RolloutBatch:
    """Padded to the longest prompt and response of the part; log-prob = -token, version = token."""
    rows, prompt_width, width = len(prompts), max(map(len, prompts)), max(map(len, responses))
    filled = torch.tensor([row + [0] * (width - len(row)) for row in responses])
    mask = filled > 0
    return RolloutBatch(
        tokens=TokenBatch(
            prompts=torch.tensor([[PAD] * (prompt_width - len(row)) + row for row in prompts]),
            prompt_lengths=torch.tensor([len(row) for row in prompts]),
            responses=torch.where(mask, filled, PAD),
            response_lengths=torch.tensor([len(row) for row in responses]),
            batch_size=[rows],
        ),
        response_mask=mask,
        rollout_log_probs=-filled.float(),
        policy_versions=torch.where(mask, filled, -1),
        group_ids=torch.tensor(group_ids),
        finished=torch.tensor([len(row) % 2 == 0 for row in responses]),
        batch_size=[rows],
    )


PROMPTS, RESPONSES = [[1, 2, 3], [4], [5, 6], [7]], [[11], [12, 13], [14, 15, 16], [17]]


def make_batch(first: int, **changes: Any) -> ScoredBatch:
    """Two prompts with two samples each; scores count from ``first``."""
    rollouts = make_rollouts(PROMPTS, RESPONSES, [0, 0, 1, 1])
    fields = {
        "scores": torch.arange(first, first + 4, dtype=torch.float32),
        "prompts": [PromptRow(first + group, [1], [], "source", None, {}) for group in range(2)],
        "texts": [f"text {first + row}" for row in range(4)],
        "extras": {"acc": [float(first + row) for row in range(4)]},
    }
    return ScoredBatch(rollouts, **{**fields, **changes})


def test_rows_have_the_prompt_of_their_group_and_a_score_stands_for_a_missing_accuracy() -> None:
    scored = make_batch(10, extras={"acc": [1.0, None, 0.0, None]})
    assert [row.row_index for row in scored.rows] == [10, 10, 11, 11]
    assert scored.accuracies() == [1, 11, 0, 13]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"scores": torch.zeros(4, dtype=torch.float64)},
            r"ScoredBatch\.scores must be torch.float32 .* got torch.float64",
        ),
        (
            {"scores": torch.zeros(3)},
            r"ScoredBatch\.scores must be .* of shape \[4\], got torch.float32 of shape \[3\]",
        ),
        (
            {"component_scores": torch.zeros(4)},
            r"ScoredBatch\.component_scores must be .* of shape \[4, 'K'\]",
        ),
        ({"reward_baselines": torch.zeros(4, 1)}, r"ScoredBatch\.reward_baselines must be .* of shape \[4\]"),
        ({"texts": ["one"]}, r"ScoredBatch\.texts must have one value for each of 4 rows, got 1"),
        (
            {"extras": {"acc": [1.0]}},
            r"ScoredBatch\.extras\['acc'\] must have one value for each of 4 rows, got 1",
        ),
    ],
)
def test_what_does_not_fit_the_rollouts_names_the_field(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_batch(0, **changes)
