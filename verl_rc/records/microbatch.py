"""Balancing rows over ranks and cutting them into micro-batches. Pure integer arithmetic."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def balanced_partition(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Row numbers in ``num_parts`` lists whose token sums are nearly equal; each list ascending.

    Longest-processing-time greedy (Graham 1969): longest row first, always to the lightest part, never more
    than ``ceil(rows / parts)`` rows to one part, so the numbers of rows differ by at most one when they do
    not divide.
    """
    most_rows = -(-len(lengths) // num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for row in sorted(range(len(lengths)), key=lambda r: (-lengths[r], r)):
        load, part = heapq.heappop(loads)
        parts[part].append(row)
        if len(parts[part]) < most_rows:
            heapq.heappush(loads, (load + lengths[row], part))
    return [sorted(part) for part in parts]


MicroBatches = list[list[int]]


@dataclass(frozen=True)
class MicroBatchLimit:
    """The size limit of one forward pass: a number of rows, or a number of tokens."""

    max_rows: int | None = None
    """Rows of one micro-batch on one rank. None means no limit by rows."""
    max_tokens: int | None = None
    """Tokens (prompt and response) of one micro-batch on one rank; a longer row forms its own micro-batch."""

    def __post_init__(self) -> None:
        """Exactly one limit must be given."""
        if (self.max_rows is None) == (self.max_tokens is None):
            raise ValueError(f"a micro-batch is limited by rows or by tokens, got {self}.")

    def shared_by(self, ranks: int) -> "MicroBatchLimit":
        """The limit of a micro-batch whose tokens ``ranks`` ranks share: each has as many tokens as it would
        have alone."""
        return self if self.max_tokens is None else MicroBatchLimit(max_tokens=self.max_tokens * ranks)


def assign_rows(lengths: Sequence[int], num_ranks: int, limit: MicroBatchLimit) -> list[MicroBatches]:
    """Give every row to one rank and cut each rank's rows into micro-batches.

    ``lengths`` are the rows' token counts. Returns for each rank its micro-batches (lists of row numbers).
    Every rank gets the same *number* of micro-batches, because FSDP's collectives need all ranks in every
    forward pass; a rank with fewer rows gets empty lists, for which it runs a forward pass that contributes
    nothing.
    """
    per_rank = balanced_partition(lengths, num_ranks)
    micro_batches = [_cut(rows, lengths, limit) for rows in per_rank]
    count = max((len(batches) for batches in micro_batches), default=0)
    return [batches + [[] for _ in range(count - len(batches))] for batches in micro_batches]


def _cut(rows: list[int], lengths: Sequence[int], limit: MicroBatchLimit) -> MicroBatches:
    if limit.max_rows is not None:
        return [rows[start : start + limit.max_rows] for start in range(0, len(rows), limit.max_rows)]
    assert limit.max_tokens is not None
    batches: MicroBatches = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: -lengths[r]):
        fitting = [index for index, free in enumerate(room) if free >= lengths[row]]
        if fitting:
            tightest = min(fitting, key=lambda index: room[index])
            batches[tightest].append(row)
            room[tightest] -= lengths[row]
        else:
            batches.append([row])
            room.append(limit.max_tokens - lengths[row])
    return batches
