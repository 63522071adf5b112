"""Time and peak memory of rollout correction, as multiples of the plain weight computation and of one input tensor.

Run: ``python scripts/bench/correction.py [rows] [length]``
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from verl_rc.config import RolloutCorrectionConfig
from verl_rc.correction import compute_rollout_correction

FOUR_RULES = {"rollout_rs": "token_k1,seq_mean_k1,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "0.5_2.0,0.9_1.1,0.05,10"}
CASES: dict[str, dict[str, object]] = {
    "metrics only": {},
    "token weights": {"rollout_is": "token"},
    "sequence weights": {"rollout_is": "sequence"},
    "token weights, 4 rules": {"rollout_is": "token", "rollout_is_batch_normalize": True, **FOUR_RULES},
    "the same, full": {"rollout_is": "token", "rollout_is_batch_normalize": True, **FOUR_RULES, "diagnostics": "full"},
}


def plain_weights(train: Tensor, rollout: Tensor, mask: Tensor) -> Tensor:
    """The least that any implementation does: ``min(exp(l), 2)`` and its mean."""
    weights = (train - rollout).clamp(-20, 20).exp().clamp_max(2.0) * mask
    weights.sum() / mask.sum()
    return weights


def best_time(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of a few calls."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def peak_bytes(function: Callable[[], object]) -> int:
    """Most bytes of tensors alive at once that the call allocated, its results included."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    del result
    alive = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


def main() -> None:
    """Prints one line for each case."""
    rows, length = (int(sys.argv[1]), int(sys.argv[2])) if len(sys.argv) == 3 else (512, 8192)
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    rollout = -torch.rand(rows, length, generator=generator)
    train = rollout + 0.05 * torch.randn(rows, length, generator=generator)
    plain = best_time(lambda: plain_weights(train, rollout, mask))
    tensor = train.nbytes
    print(f"{rows} rows of {length} tokens, {torch.get_num_threads()} thread(s); plain weights {plain:.3f} s")
    for name, fields in CASES.items():
        config = RolloutCorrectionConfig.model_validate(fields)

        def correct(config: RolloutCorrectionConfig = config) -> object:
            result = compute_rollout_correction(train, rollout, mask, config)
            return result, result.metrics()

        seconds, peak = best_time(correct), peak_bytes(correct)
        print(f"{name:<24} {seconds:7.3f} s   {seconds / plain:5.1f}x plain   peak {peak / tensor:5.2f} input tensors")


if __name__ == "__main__":
    main()
