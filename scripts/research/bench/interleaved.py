"""Timing candidates fairly: their calls alternate."""

import ctypes
import statistics
import time
from collections.abc import Callable, Sequence


def interleaved_seconds(
    candidates: Sequence[Callable[[], object]], rounds: int, *, cold: bool = False
) -> list[float]:
    """Median wall-clock seconds of each candidate; the first round is warm-up.

    ``cold``: return free memory to the system before every call, as between two steps of a run; otherwise a
    large temporary reuses the pages of the previous call.
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
