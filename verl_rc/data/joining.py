"""Putting rollouts together that were sampled in several calls."""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from verl_rc.data.batches import RolloutBatch


def join_rollouts(parts: Sequence[RolloutBatch], pad_token_id: int) -> RolloutBatch:
    """The rows of all parts, in order, padded to the widest prompt and response; groups keep the ids they have.

    Raises ``ValueError`` when there is no part.
    """
    if not parts:
        raise ValueError("at least one rollout batch must be given, got none.")
    prompt_width = max(part.tokens.prompts.shape[1] for part in parts)
    width = max(part.tokens.responses.shape[1] for part in parts)
    joined: RolloutBatch = RolloutBatch.cat([_padded(part, prompt_width, width, pad_token_id) for part in parts])
    return joined


def take_groups(rollouts: RolloutBatch, groups: Sequence[int]) -> tuple[RolloutBatch, list[int]]:
    """The rows of ``groups``, which are renumbered 0, 1, … in the order given; also the numbers of the rows taken."""
    place = {group: index for index, group in enumerate(groups)}
    ids = rollouts.group_ids.tolist()
    rows = sorted((row for row, group in enumerate(ids) if group in place), key=lambda row: place[ids[row]])
    taken = rollouts[rows].clone()
    taken.group_ids = torch.tensor([place[ids[row]] for row in rows], dtype=torch.int64)
    return taken, rows


def _padded(part: RolloutBatch, prompt_width: int, width: int, pad_token_id: int) -> RolloutBatch:
    missing = width - part.tokens.responses.shape[1]
    padded = part.clone()
    padded.tokens.prompts = pad(part.tokens.prompts, (prompt_width - part.tokens.prompts.shape[1], 0), value=pad_token_id)
    padded.tokens.responses = pad(part.tokens.responses, (0, missing), value=pad_token_id)
    padded.response_mask = pad(part.response_mask, (0, missing), value=False)
    padded.rollout_log_probs = pad(part.rollout_log_probs, (0, missing), value=0.0)
    padded.policy_versions = pad(part.policy_versions, (0, missing), value=-1)
    return padded
