"""Balancing rows over ranks and cutting them into micro-batches. Pure integer arithmetic."""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

LEAST_SAVED = 0.1
"""Share of a row that must be computed anyway for the row not to compute it."""
_ANY = 1 << 62
"""More tokens than a row has."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Rows in an order in which those with a common prefix lie side by side.

    Any two of them share at least the smallest number of ``shared`` between them.
    """

    order: list[int]
    """Row numbers."""
    shared: list[int]
    """Tokens that each row of ``order`` has in common with the one before it, from the first token on; 0
    where they are less than ``LEAST_SAVED`` of it."""
    lengths: list[int]
    """Tokens of each row, by its number."""

    @classmethod
    def worthwhile(cls, order: list[int], common: Iterable[int], lengths: list[int]) -> "SharedPrefixes":
        """Of the tokens that each row of ``order`` has in ``common`` with the one before it those that are
        worth it."""
        shared = [
            tokens if tokens >= LEAST_SAVED * lengths[row] else 0
            for row, tokens in zip(order, common, strict=True)
        ]
        return cls(order, shared, lengths)

    @property
    def saved_tokens(self) -> int:
        """Tokens that need not be computed."""
        return sum(self.shared)

    def of(self, rows: Sequence[int]) -> "SharedPrefixes":
        """The prefixes of some of the rows, which are numbered by their place in ``rows``."""
        place = {row: index for index, row in enumerate(rows)}
        order, commons, common = list[int](), list[int](), 0
        for row, with_previous in zip(self.order, self.shared, strict=True):
            common = min(common, with_previous)
            if row in place:
                order.append(place[row])
                commons.append(common)
                common = _ANY
        return SharedPrefixes.worthwhile(order, commons, [self.lengths[row] for row in rows])

    def families(self) -> list["Family"]:
        """Rows that share a prefix, family by family; a row that shares none is a family of its own."""
        families: list[Family] = []
        for row, common in zip(self.order, self.shared, strict=True):
            if not common:
                families.append([])
            families[-1].append((row, common))
        return families


Family = list[tuple[int, int]]
"""Rows that share a prefix, each with the number of tokens that it shares with the one before it."""


MicroBatches = list[list[int]]


@dataclass(frozen=True)
class MicroBatchLimit:
    """The size limit of one forward pass: a number of rows, or a number of tokens."""

    max_rows: int | None = None
    """Rows of one micro-batch on one rank. None means no limit by rows."""
    max_tokens: int | None = None
    """Tokens of one micro-batch on one rank, shared ones counted once; a longer row forms its own
    micro-batch."""

    def __post_init__(self) -> None:
        """Exactly one limit must be given."""
        if (self.max_rows is None) == (self.max_tokens is None):
            raise ValueError(f"a micro-batch is limited by rows or by tokens, got {self}.")

    def shared_by(self, ranks: int) -> "MicroBatchLimit":
        """The limit of a micro-batch whose tokens ``ranks`` ranks share: each has as many tokens as it would
        have alone."""
        return self if self.max_tokens is None else MicroBatchLimit(max_tokens=self.max_tokens * ranks)


def assign_rows(
    lengths: Sequence[int],
    num_ranks: int,
    limit: MicroBatchLimit,
    prefixes: SharedPrefixes | None = None,
    balanced: bool = True,
) -> list[MicroBatches]:
    """Give every row to one rank and cut each rank's rows into micro-batches.

    ``lengths`` are the rows' token counts. With ``prefixes``, rows that share one go to the same rank and
    micro-batch where balance and limit allow, and a prefix counts once in each micro-batch. Returns for each
    rank its micro-batches (lists of row numbers). Every rank gets the same *number* of micro-batches, because
    FSDP's collectives need all ranks in every forward pass; a rank with fewer rows gets empty lists, for
    which it runs a forward pass that contributes nothing. Not ``balanced``, each rank gets the next rows, as
    many as any other or one fewer.
    """
    if balanced:
        per_rank = balanced_partition(lengths, num_ranks, prefixes)
    else:
        ends = [-(-len(lengths) * rank // num_ranks) for rank in range(num_ranks + 1)]
        per_rank = [list(range(start, end)) for start, end in pairwise(ends)]
    micro_batches = [_cut(_families(rows, prefixes), lengths, limit) for rows in per_rank]
    count = max((len(batches) for batches in micro_batches), default=0)
    return [batches + [[] for _ in range(count - len(batches))] for batches in micro_batches]


def balanced_partition(
    lengths: Sequence[int], num_parts: int, prefixes: SharedPrefixes | None = None
) -> list[list[int]]:
    """Row numbers in ``num_parts`` lists whose token sums are nearly equal; each list ascending.

    No part gets more than ``ceil(rows / parts)`` rows, so the numbers of rows differ by at most one when they
    do not divide. Families of rows that share a prefix are cut into ever smaller pieces, and the cut whose
    largest part has the fewest tokens is taken.
    """
    if prefixes is None or num_parts == 1 or not prefixes.saved_tokens:
        return _in_parts([[(row, 0)] for row in range(len(lengths))], lengths, num_parts)
    families = prefixes.families()
    fair = sum(num_tokens(family, lengths) for family in families) / num_parts
    cuts = (_cut_all(families, lengths, fair * share) for share in _SHARES)
    tries = [_in_parts(pieces, lengths, num_parts) for pieces in cuts]
    return min(tries, key=lambda parts: max(_loads(parts, families, lengths)))


_SHARES = (1, 1 / 2, 1 / 4, 0)
"""Sizes of pieces of families that are tried, as shares of what has room."""


def _cut_all(families: Sequence[Family], lengths: Sequence[int], most_tokens: float) -> list[Family]:
    return [piece for family in families for piece in _pieces(family, lengths, most_tokens)]


def _loads(parts: Sequence[Sequence[int]], families: Sequence[Family], lengths: Sequence[int]) -> list[int]:
    """Tokens of each part; what its rows share counts once."""
    loads = [sum(lengths[row] for row in part) for part in parts]
    part_of = {row: number for number, part in enumerate(parts) for row in part}
    for family in families:
        last: dict[int, int] = {}
        for place, (row, _) in enumerate(family):
            part = part_of[row]
            if part in last:
                loads[part] -= min(common for _, common in family[last[part] + 1 : place + 1])
            last[part] = place
    return loads


def num_tokens(family: Family, lengths: Sequence[int]) -> int:
    """Tokens of rows of which each shares some with the one before it."""
    return sum(lengths[row] for row, _ in family) - sum(common for _, common in family[1:])


def _in_parts(families: Sequence[Family], lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """The rows of ``families`` in parts, by longest-processing-time greedy (Graham 1969): the largest first,
    always to the lightest part with room for it; where none has, what fits."""
    most_rows = -(-sum(map(len, families)) // num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    waiting = sorted(families, key=lambda family: (num_tokens(family, lengths), -family[0][0]))
    while waiting:
        family, passed = waiting.pop(), list[tuple[int, int]]()
        while loads and len(parts[loads[0][1]]) + len(family) > most_rows:
            passed.append(heapq.heappop(loads))
        load, part = heapq.heappop(loads) if loads else passed.pop(0)
        room = most_rows - len(parts[part])
        if len(family) > room:
            waiting.append(family[room:])
        parts[part] += [row for row, _ in family[:room]]
        for entry in (*passed, (load + num_tokens(family[:room], lengths), part)):
            if len(parts[entry[1]]) < most_rows:
                heapq.heappush(loads, entry)
    return [sorted(part) for part in parts]


def _families(rows: list[int], prefixes: SharedPrefixes | None) -> list[Family]:
    """The families of some rows, by their first row."""
    if prefixes is None:
        return [[(row, 0)] for row in rows]
    families = prefixes.of(rows).families()
    return sorted([[(rows[place], common) for place, common in family] for family in families], key=min)


def _pieces(family: Family, lengths: Sequence[int], most_tokens: float) -> list[Family]:
    """The family in pieces of at most ``most_tokens``; a longer row is a piece of its own."""
    pieces: list[Family] = []
    room = 0.0
    for row, common in family:
        if not pieces or lengths[row] - common > room:
            pieces.append([])
            room, common = most_tokens, 0
        pieces[-1].append((row, common))
        room -= lengths[row] - common
    return pieces


def _cut(families: list[Family], lengths: Sequence[int], limit: MicroBatchLimit) -> MicroBatches:
    """Micro-batches of a rank's rows. Families that are too large for the room that others leave are cut,
    where that saves a micro-batch."""
    if limit.max_rows is not None:
        rows = [row for family in families for row, _ in family]
        return [rows[start : start + limit.max_rows] for start in range(0, len(rows), limit.max_rows)]
    assert limit.max_tokens is not None
    shares = _SHARES if any(len(family) > 1 for family in families) else (1,)
    cuts = (_cut_all(families, lengths, limit.max_tokens * share) for share in shares)
    return min((_best_fit(pieces, lengths, limit.max_tokens) for pieces in cuts), key=len)


def _best_fit(pieces: list[Family], lengths: Sequence[int], max_tokens: int) -> MicroBatches:
    """Pieces in micro-batches: the largest first, each where the least room is left."""
    batches: MicroBatches = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -num_tokens(piece, lengths)):
        tokens = num_tokens(piece, lengths)
        fitting = [index for index, free in enumerate(room) if free >= tokens]
        rows = [row for row, _ in piece]
        if fitting:
            tightest = min(fitting, key=lambda index: room[index])
            batches[tightest] += rows
            room[tightest] -= tokens
        else:
            batches.append(rows)
            room.append(max_tokens - tokens)
    return batches
