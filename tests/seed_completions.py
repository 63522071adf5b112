"""Completions of engines that answer every request with its seed."""

import torch

from verl_rc.data.batches import Completions


def completions(seeds: list[int]) -> Completions:
    """One-token rows that are the requests' seeds."""
    tokens = torch.tensor(seeds, dtype=torch.int64)[:, None]
    return Completions(
        responses=tokens,
        response_lengths=torch.ones_like(tokens[:, 0]),
        rollout_log_probs=torch.zeros(tokens.shape),
        policy_versions=torch.zeros_like(tokens),
        finished=torch.ones(len(seeds), dtype=torch.bool),
        batch_size=[len(seeds)],
    )
