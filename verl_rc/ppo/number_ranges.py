"""Sets of group numbers, kept as ranges: a million decided numbers are a handful of pairs."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

PlainRanges = tuple[tuple[int, int], ...]
"""Ranges [first, end) of numbers as a checkpoint holds them."""


@dataclass(frozen=True)
class NumberRanges:
    """A set of numbers >= 0; ``from_numbers`` and ``from_plain`` make one."""

    ranges: tuple[tuple[int, int], ...] = ()
    """Pairs of the first number of a range and the one behind its last, ascending; they neither overlap nor touch."""

    @classmethod
    def from_numbers(cls, numbers: Iterable[int]) -> "NumberRanges":
        """The set of ``numbers``, in any order; a number that comes twice counts once."""
        ranges: list[tuple[int, int]] = []
        for number in sorted(set(numbers)):
            if ranges and ranges[-1][1] == number:
                ranges[-1] = (ranges[-1][0], number + 1)
            else:
                ranges.append((number, number + 1))
        return cls(tuple(ranges))

    @classmethod
    def from_plain(cls, plain: Sequence[Sequence[int]]) -> "NumberRanges":
        """What ``plain`` gave. Raises ``ValueError`` for ranges that are empty, out of order or not merged."""
        ends = [int(end) for pair in plain for end in pair]
        is_ascending = all(before < end for before, end in zip([-1, *ends], ends, strict=False))
        if any(len(pair) != 2 for pair in plain) or not is_ascending:
            raise ValueError(f"ranges must be ascending pairs [first, end) of numbers >= 0, apart, got {list(plain)[:5]}.")
        return cls(tuple(zip(ends[::2], ends[1::2], strict=True)))

    def plain(self) -> PlainRanges:
        """Return the ranges for a checkpoint."""
        return self.ranges

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self.ranges, number, key=_end)
        return place < len(self.ranges) and self.ranges[place][0] <= number

    def __len__(self) -> int:
        return sum(end - first for first, end in self.ranges)

    def __iter__(self) -> Iterator[int]:
        return (number for first, end in self.ranges for number in range(first, end))

    def union(self, other: "NumberRanges") -> "NumberRanges":
        """All numbers of both; cheap where ``other`` has few ranges."""
        ranges = list(self.ranges)
        for first, end in other.ranges:
            start, stop = bisect_left(ranges, first, key=_end), bisect_right(ranges, end, key=_first)
            touched = ranges[start:stop]
            ranges[start:stop] = [(min([first, *map(_first, touched)]), max([end, *map(_end, touched)]))]
        return NumberRanges(tuple(ranges))

    def missing_below(self, end: int) -> "NumberRanges":
        """The numbers 0, 1, …, ``end`` - 1 that are not in this set."""
        starts = [0, *map(_end, self.ranges)]
        stops = [*map(_first, self.ranges), end]
        gaps = ((start, min(stop, end)) for start, stop in zip(starts, stops, strict=True))
        return NumberRanges(tuple((start, stop) for start, stop in gaps if start < stop))


def _first(pair: tuple[int, int]) -> int:
    return pair[0]


def _end(pair: tuple[int, int]) -> int:
    return pair[1]
