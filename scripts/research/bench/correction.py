"""Time and peak memory of rollout correction: against verl's function, a plain weight computation and a plain
read of the inputs.

verl lives in a folder of its own, without what it depends on (both libraries see the same torch and the same
tensors):
    pip install --no-deps --target ~/.verl verl==0.9.1 codetiming orjson
Run: python scripts/research/bench/correction.py --verl ~/.verl [--shape 512x4096 --shape 256x8192]

The candidates take turns in one process; the median over the rounds is printed, with metrics as plain numbers
included.
"""

from __future__ import annotations

import argparse
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from interleaved import interleaved_seconds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from verl_rc.config import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

CASES: Mapping[str, Mapping[str, object]] = {
    "token weights": {"rollout_is": "token", "rollout_is_threshold": 2.0},
    "sequence weights": {"rollout_is": "sequence", "rollout_is_threshold": 2.0},
    "two rules": {"rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,0.05"},
    "token weights and two rules": {
        "rollout_is": "token",
        "rollout_is_threshold": 2.0,
        "rollout_rs": "token_k1,seq_mean_k3",
        "rollout_rs_threshold": "0.5_2.0,0.05",
    },
}


@dataclass(frozen=True)
class Inputs:
    """The inputs of a correction, ``[rows, length]``."""

    train: Tensor
    rollout: Tensor
    mask: Tensor
    distributions: Mapping[str, Tensor]
    """Entropies, sums of squared probabilities and varentropies, which full diagnostics read."""

    @classmethod
    def random(cls, rows: int, length: int) -> Inputs:
        """Rows of all lengths with a gap of 0.05 nats."""
        generator = torch.Generator().manual_seed(0)
        mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
        rollout = -torch.rand(rows, length, generator=generator)
        train = rollout + 0.05 * torch.randn(rows, length, generator=generator)
        names = ("entropies", "sum_pi_squared", "varentropies")
        return cls(
            train, rollout, mask, {name: torch.rand(rows, length, generator=generator) for name in names}
        )

    def read(self) -> Tensor:
        """Read all inputs once: a lower bound for every candidate."""
        return self.train.sum() + self.rollout.sum() + self.mask.sum()

    def plain_weights(self) -> Tensor:
        """``min(exp(l), 2)`` and its mean: a lower bound for token weights."""
        weights = (self.train - self.rollout).clamp(-20, 20).exp().clamp_max(2.0) * self.mask
        weights.sum() / self.mask.sum()
        return weights


Candidate = Callable[[], object]


def ours(inputs: Inputs, fields: Mapping[str, object], diagnostics: str) -> Candidate:
    """Weights, mask and metrics."""
    config = RolloutCorrectionConfig.model_validate({**fields, "diagnostics": diagnostics})

    def correct() -> object:
        result = compute_rollout_correction(
            inputs.train, inputs.rollout, inputs.mask, config, **inputs.distributions
        )
        return result, result.metrics()

    return correct


def bypass(fields: Mapping[str, object]) -> Mapping[str, object]:
    """The same correction in bypass mode."""
    return {**fields, "bypass_mode": True, "loss_type": "reinforce"}


def theirs(inputs: Inputs, fields: Mapping[str, object]) -> Candidate:
    """verl's weights, mask and metrics; its mask is a floating-point tensor."""
    from verl.trainer.ppo.rollout_corr_helper import (  # not a dependency: found on --verl
        compute_rollout_correction_and_rejection_mask,
    )

    mask = inputs.mask.float()
    return lambda: compute_rollout_correction_and_rejection_mask(inputs.train, inputs.rollout, mask, **fields)


def peak_bytes(candidate: Candidate) -> int:
    """Peak bytes of tensors and arrays that the call allocated, including its results."""
    tracemalloc.start()  # NumPy's arrays
    candidate()
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = candidate()
    del result
    alive = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak + arrays


def print_table(rows: int, length: int, rounds: int, *, with_verl: bool, cold: bool) -> None:
    """One line for each case."""
    inputs = Inputs.random(rows, length)
    read, plain = interleaved_seconds([inputs.read, inputs.plain_weights], 2 * rounds)
    tokens, threads = f"{inputs.train.numel():,} positions", torch.get_num_threads()
    print(
        f"\n{rows} x {length} ({tokens}), float32, {threads} thread(s); read {read:.4f} s, plain weights "
        f"{plain:.4f} s"
    )
    print(
        "| case | core, s | full, s | signatures | reads | verl, s | verl / core | verl / full | peak core, "
        "full, verl |"
    )
    print(f"|{'---|' * 9}")
    for name, fields in CASES.items():
        # Bypass mode measures everything else, but takes its signatures elsewhere.
        candidates = [
            ours(inputs, variant, kind)
            for variant, kind in ((fields, "core"), (fields, "full"), (bypass(fields), "full"))
        ]
        candidates += [theirs(inputs, fields)] if with_verl else []
        core, full, bare, *verl = interleaved_seconds(candidates, rounds, cold=cold)
        del candidates[2]
        peaks = ", ".join(f"{peak_bytes(candidate) / inputs.train.nbytes:.2f}" for candidate in candidates)
        compared = (
            [f"{verl[0]:.3f}", f"{verl[0] / core:.1f}", f"{verl[0] / full:.1f}"] if verl else ["", "", ""]
        )
        cells = [
            name,
            f"{core:.3f}",
            f"{full:.3f}",
            f"{full / bare - 1:+.0%}",
            f"{core / read:.1f}",
            *compared,
            peaks,
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
    print("peaks in input-sized float32 tensors, outputs included")


def main() -> None:
    """Prints a table for each shape."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verl", help="folder that verl was installed to")
    parser.add_argument("--shape", action="append", help="ROWSxLENGTH, several times")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cold", action="store_true", help="give free memory back to the system before every call"
    )
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.verl is not None:
        sys.path.append(options.verl)
    for shape in options.shape or ["512x4096", "256x8192"]:
        rows, length = map(int, shape.split("x"))
        print_table(rows, length, options.rounds, with_verl=options.verl is not None, cold=options.cold)


if __name__ == "__main__":
    main()
