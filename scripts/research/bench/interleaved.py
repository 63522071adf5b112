"""Timing candidates fairly: their calls alternate."""

import statistics
import time
from collections.abc import Callable, Sequence


def interleaved_seconds(candidates: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median wall-clock seconds of each candidate; the first round is warm-up."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for round_number in range(rounds + 1):
        for candidate, times in zip(candidates, seconds, strict=True):
            start = time.perf_counter()
            candidate()
            if round_number:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
