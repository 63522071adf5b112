"""Advantage estimators against verl's functions, in one process on the same tensors.

verl lives in a folder of its own, without what it depends on:
    pip install --no-deps --target ~/.verl verl==0.9.1 codetiming orjson
Run: python scripts/research/bench/advantages.py --verl ~/.verl [--shape 4096x4096]
The candidates take turns; medians are printed, and the largest difference of the results.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from interleaved import interleaved_seconds
from torch import Tensor

from verl_rc.algorithm.advantage import compute_advantages

GAMMA, LAM, GROUP_SIZE = 0.99, 0.95, 8
Estimate = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ScoredRows:
    """A batch of scored rows, ``[rows, length]``."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    group_ids: list[int]

    @classmethod
    def random(cls, rows: int, length: int) -> ScoredRows:
        """Rows of all lengths with an outcome reward."""
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, length + 1, (rows, 1), generator=generator)
        mask = torch.arange(length) < lengths
        values = torch.randn(rows, length, generator=generator) * mask
        rewards = torch.zeros(rows, length).scatter(1, lengths - 1, torch.rand(rows, 1, generator=generator))
        return cls(rewards, values, mask, [row // GROUP_SIZE for row in range(rows)])

    def ours(self, name: str) -> Estimate:
        """This project's estimator."""
        return lambda: compute_advantages(
            name, self.rewards, self.mask, group_ids=self.group_ids, values=self.values, gamma=GAMMA, lam=LAM
        )

    def theirs(self, name: str) -> Estimate:
        """verl's, which keeps masks in floating point and groups in an array of objects."""
        from verl.trainer.ppo import core_algos  # not a dependency: found on --verl

        mask, index = self.mask.float(), np.array([str(group) for group in self.group_ids], dtype=object)
        gamma: Any = GAMMA
        arguments: Mapping[str, Mapping[str, Any]] = {
            "gae": {"values": self.values, "gamma": gamma, "lam": LAM},
            "reinforce_plus_plus": {"config": SimpleNamespace(gamma=GAMMA)},
        }
        function = {
            "gae": core_algos.compute_gae_advantage_return,
            "reinforce_plus_plus": core_algos.compute_reinforce_plus_plus_outcome_advantage,
            "reinforce_plus_plus_baseline": core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage,
            "grpo": core_algos.compute_grpo_outcome_advantage,
            "rloo": core_algos.compute_rloo_outcome_advantage,
            "opo": core_algos.compute_opo_outcome_advantage,
        }[name]
        further = arguments.get(name, {"index": index})
        return lambda: function(token_level_rewards=self.rewards.clone(), response_mask=mask, **further)


NAMES = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "grpo", "rloo", "opo")


def main() -> None:
    """Prints one line for each estimator."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--verl", required=True, help="folder that verl was installed to")
    parser.add_argument("--shape", default="4096x4096", help="ROWSxLENGTH")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.path.append(options.verl)
    rows, length = map(int, options.shape.split("x"))
    inputs = ScoredRows.random(rows, length)
    print(f"{rows} x {length}, float32, {options.threads} thread(s)")
    print("| estimator | seconds | verl, seconds | verl / ours | largest difference |\n|---|---|---|---|---|")
    for name in NAMES:
        ours, theirs = inputs.ours(name), inputs.theirs(name)
        difference = (ours()[0] - theirs()[0]).abs().max().item()
        seconds, verl_seconds = interleaved_seconds([ours, theirs], rounds=3)
        ratio = verl_seconds / seconds
        print(f"| {name} | {seconds:.3f} | {verl_seconds:.3f} | {ratio:.1f} | {difference:.0e} |")


if __name__ == "__main__":
    main()
