"""How much faster the advantage estimators are than loops over columns and groups, as ratios measured in one run.

Run: ``python scripts/bench/advantages.py [rows] [length]``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from verl_rc.advantage import compute_advantages
from verl_rc.advantage.gae import generalised_returns

GAMMA, LAM, GROUP_SIZE = 0.99, 0.95, 8


def column_loop_returns(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """λ-returns by a loop over the columns of a row-major tensor."""
    following_value = torch.zeros(rewards.shape[0])
    following_advantage = torch.zeros(rewards.shape[0])
    weights = mask.float()
    columns = []
    for t in reversed(range(rewards.shape[1])):
        residual = rewards[:, t] + GAMMA * following_value - values[:, t]
        advantage = residual + GAMMA * LAM * following_advantage
        following_value = values[:, t] * weights[:, t] + following_value * (1 - weights[:, t])
        following_advantage = advantage * weights[:, t] + following_advantage * (1 - weights[:, t])
        columns.append(following_advantage)
    return (torch.stack(columns[::-1], dim=1) + values) * mask


def group_loop_advantages(rewards: Tensor, mask: Tensor, group_ids: list[int]) -> Tensor:
    """GRPO by a loop over groups."""
    scores = rewards.sum(dim=-1)
    rows: dict[int, list[int]] = {}
    for row, group in enumerate(group_ids):
        rows.setdefault(group, []).append(row)
    advantages = torch.zeros_like(scores)
    for members in rows.values():
        group_scores = scores[members]
        advantages[members] = (group_scores - group_scores.mean()) / (group_scores.std() + 1e-6)
    return advantages.unsqueeze(-1) * mask


def best_time(function: Callable[[], Tensor], repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def compare(name: str, ours: Callable[[], Tensor], loop: Callable[[], Tensor]) -> None:
    """Prints both times, their ratio and the largest difference."""
    difference = (ours() - loop()).abs().max().item()
    seconds, loop_seconds = best_time(ours), best_time(loop)
    ratio = loop_seconds / seconds
    print(f"{name:<6} {seconds:8.3f} s   loop {loop_seconds:8.3f} s   {ratio:6.1f}x   max difference {difference:.1e}")


def main() -> None:
    """Compares GAE with a loop over columns and GRPO with a loop over groups."""
    rows, length = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else (4096, 4096)
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    values = torch.randn(rows, length, generator=generator) * mask
    rewards = torch.zeros(rows, length).scatter(1, lengths - 1, torch.rand(rows, 1, generator=generator))
    group_ids = [row // GROUP_SIZE for row in range(rows)]
    print(f"{rows} rows of {length} positions, {torch.get_num_threads()} thread(s)")
    compare(
        "gae",
        lambda: generalised_returns(rewards, values, mask, GAMMA, LAM),
        lambda: column_loop_returns(rewards, values, mask),
    )
    compare(
        "grpo",
        lambda: compute_advantages("grpo", rewards, mask, group_ids=group_ids)[0],
        lambda: group_loop_advantages(rewards, mask, group_ids),
    )


if __name__ == "__main__":
    main()
