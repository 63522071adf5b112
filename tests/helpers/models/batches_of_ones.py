"""Rollouts of which only lengths and log-probs matter: every token is 1; shared by tests of the step's
mathematics."""

import torch
from torch import Tensor

from verl_rc.records.batches import RolloutBatch, TokenBatch, positions_mask


def ones_tokens(response_lengths: Tensor, width: int) -> TokenBatch:
    """Prompts of one token, responses padded to ``width``."""
    rows = len(response_lengths)
    return TokenBatch(
        prompts=torch.ones(rows, 1, dtype=torch.int64),
        prompt_lengths=torch.ones(rows, dtype=torch.int64),
        responses=torch.ones(rows, width, dtype=torch.int64),
        response_lengths=response_lengths,
        batch_size=[rows],
    )


def ones_rollouts(rollout_log_probs: Tensor, response_lengths: Tensor, group: int) -> RolloutBatch:
    """Finished samples of the policy at version 0; ``group`` of them share a prompt."""
    rows, width = rollout_log_probs.shape
    return RolloutBatch(
        tokens=ones_tokens(response_lengths, width),
        response_mask=positions_mask(response_lengths, width),
        rollout_log_probs=rollout_log_probs,
        policy_versions=torch.zeros(rows, width, dtype=torch.int64),
        group_ids=torch.arange(rows) // group,
        finished=torch.ones(rows, dtype=torch.bool),
        batch_size=[rows],
    )
