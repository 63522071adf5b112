"""Timing candidates fairly: they take turns."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence


def interleaved_seconds(candidates: Sequence[Callable[[], object]], rounds: int, *, cold: bool = False) -> list[float]:
    """Median wall clock of each; the first round warms up.

    ``cold``: free memory goes back to the system before every call, as it has between two steps of a run; else a large
    temporary finds the pages of the call before.
    """
    seconds: list[list[float]] = [[] for _ in candidates]
    for round_number in range(rounds + 1):
        for candidate, times in zip(candidates, seconds, strict=True):
            if cold:
                ctypes.CDLL(None).malloc_trim(0)
            start = time.perf_counter()
            candidate()
            if round_number:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]
