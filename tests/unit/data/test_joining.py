"""Rollouts of several calls as one: every row's tokens unchanged, padding where it belongs, groups renumbered."""

import pytest
import torch

from verl_rc.data.batches import RolloutBatch, TokenBatch
from verl_rc.data.joining import join_rollouts, take_groups

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


def test_parts_of_different_widths_become_one_batch() -> None:
    parts = [make_rollouts(PROMPTS[:2], RESPONSES[:2], [0, 0]), make_rollouts(PROMPTS[2:], RESPONSES[2:], [1, 2])]
    joined = join_rollouts(parts, PAD)
    expected = make_rollouts(PROMPTS, RESPONSES, [0, 0, 1, 2])
    assert joined.batch_size == torch.Size([4])
    for found, wanted in ((joined, expected), (joined.tokens, expected.tokens)):
        fields = {name: value for name, value in wanted.to_dict().items() if isinstance(value, torch.Tensor)}
        assert len(fields) >= 4
        for name, value in fields.items():
            assert torch.equal(getattr(found, name), value), name


def test_no_part_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        join_rollouts([], PAD)


def test_groups_are_taken_in_the_order_asked_for() -> None:
    rollouts = make_rollouts(PROMPTS, RESPONSES, [5, 8, 5, 9])
    taken, rows = take_groups(rollouts, [9, 5])
    assert rows == [3, 0, 2]
    assert taken.group_ids.tolist() == [0, 1, 1]
    assert taken.tokens.responses.tolist() == [[17, PAD, PAD], [11, PAD, PAD], [14, 15, 16]]
    assert rollouts.group_ids.tolist() == [5, 8, 5, 9]
