"""Timing candidates fairly: they take turns."""

import statistics
import time
from collections.abc import Callable, Sequence


def seconds_in_turns(candidates: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Median wall clock of each; the first round warms up."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for round_number in range(rounds + 1):
        for candidate, times in zip(candidates, seconds, strict=True):
            start = time.perf_counter()
            candidate()
            if round_number:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
