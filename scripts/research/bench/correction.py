"""Rollout correction against verl's function, in one process on the same tensors.

verl lives in a folder of its own, without what it depends on:
    pip install --no-deps --target ~/.verl verl==0.9.1 codetiming orjson
Run: python scripts/research/bench/correction.py --verl ~/.verl [--shape 512x4096 --shape 256x8192]

Both compute weights, mask and metrics as plain numbers, by turns; the medians and their ratio are printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial

import torch
from interleaved import interleaved_seconds
from torch import Tensor

from verl_rc.config import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

_RULES = {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.05"}
CASES: Mapping[str, Mapping[str, object]] = {
    "token weights": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence weights": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "two rules": _RULES,
    "token weights and two rules": {"rollout_is": "token", "rollout_is_threshold": 2.0, **_RULES},
}


def random_inputs(rows: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs of trainer and rollout policy with a gap of 0.05 nats, and a mask of rows of all lengths."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    rollout = -torch.rand(rows, length, generator=generator)
    return rollout + 0.05 * torch.randn(rows, length, generator=generator), rollout, mask


def print_table(rows: int, length: int) -> None:
    """One line for each case."""
    from verl.trainer.ppo.rollout_corr_helper import (  # not a dependency: found on --verl
        compute_rollout_correction_and_rejection_mask,
    )

    train, rollout, mask = random_inputs(rows, length)
    float_mask = mask.float()
    print(f"\n{rows} x {length}, float32, {torch.get_num_threads()} thread(s)")
    print("| case | core, s | full, s | verl, s | verl / core | verl / full |\n|---|---|---|---|---|---|")

    def ours(fields: Mapping[str, object], diagnostics: str) -> Mapping[str, float]:
        config = RolloutCorrectionConfig.model_validate({**fields, "diagnostics": diagnostics})
        return compute_rollout_correction(train, rollout, mask, config).metrics()

    for name, fields in CASES.items():
        theirs = partial(compute_rollout_correction_and_rejection_mask, train, rollout, float_mask, **fields)
        candidates = [partial(ours, fields, "core"), partial(ours, fields, "full"), theirs]
        core, full, verl = interleaved_seconds(candidates, rounds=9)
        print(f"| {name} | {core:.3f} | {full:.3f} | {verl:.3f} | {verl / core:.1f} | {verl / full:.1f} |")


def main() -> None:
    """Prints a table for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl", required=True, help="folder that verl was installed to")
    parser.add_argument("--shape", action="append", help="ROWSxLENGTH, several times")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.path.append(options.verl)
    for shape in options.shape or ["512x4096", "256x8192"]:
        rows, length = map(int, shape.split("x"))
        print_table(rows, length)


if __name__ == "__main__":
    main()
