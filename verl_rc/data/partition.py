"""Splitting rows into parts of nearly equal token counts."""

import heapq
from collections.abc import Sequence


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Row numbers in ``num_parts`` lists whose token sums are nearly equal; each list ascending.

    Longest-processing-time greedy (Graham 1969): longest row first, always to the lightest part, never more than
    ``ceil(rows / parts)`` rows to one part, so the numbers of rows differ by at most one when they do not divide.
    """
    if num_parts < 1:
        raise ValueError(f"rows are split into at least one part, got {num_parts}.")
    most_rows = -(-len(lengths) // num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        load, part = heapq.heappop(loads)
        parts[part].append(row)
        if len(parts[part]) < most_rows:
            heapq.heappush(loads, (load + lengths[row], part))
    return [sorted(part) for part in parts]
